"""The interface of rules whose trials pause at rungs until they are promoted.

What must not live here: a particular rule (`halving`, `pbt`), Ray, and the ledger.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sweeps.early_stopping.metric_values import Minimize, Value
from sweeps.early_stopping.patience import Patience

if TYPE_CHECKING:  # this package lies below the specs
    from sweeps.config.spec import SweepSpec

Reports = Mapping[int, Mapping[int, Value]]
"""By trial, the metric after each reported epoch, or with several metrics all values."""
StopDecider = Callable[[Reports, Set[int], Set[int], Set[int]], Mapping[int, str]]
"""Receives all reports, the unfinished trials, those that are exempt, and those on whose last
report a driver has decided. Returns which of the other unfinished trials stop at their last
report, and why; an exempt one would stop there."""


@dataclass(frozen=True, kw_only=True)
class PausingRule(ABC):
    """The rungs of a sweep whose trials pause at each one until they are promoted.

    A pausing rule keeps no state between two calls. A driver that resumes a sweep therefore
    decides as the earlier driver did.

    Attributes:
        rungs: Epochs at which a trial pauses, ascending.
        minimize: Whether less is better; with several metrics, for each.
        num_trials: How many trials the sweep will have.
        patience: When a trial ends before its budget; None: only at its end.
    """

    rungs: tuple[int, ...]
    minimize: Minimize
    num_trials: int
    patience: Patience | None = None

    def pause_at_epoch(self, epoch: int) -> int | None:
        """Return the next rung after an epoch; None: the trial trains to the end."""
        return next((rung for rung in self.rungs if rung > epoch), None)

    def pauses_at(self, reports: Mapping[int, Value]) -> bool:
        """Return whether an unfinished trial with these reports waits for its promotion."""
        return max(reports, default=0) in self.rungs

    @abstractmethod
    def next_promotion(
        self,
        reports: Reports,
        unfinished: Set[int],
        live: Set[int] = frozenset(),
        exempt: Set[int] = frozenset(),
    ) -> int | None:
        """Return the trial that resumes next; None while all trials must wait.

        Args:
            reports: The reports of all trials, including finished ones.
            unfinished: The trials that have not ended.
            live: The unfinished trials that are running.
            exempt: The trials that never pause and train to the end.
        """

    @abstractmethod
    def never_promoted(
        self, reports: Reports, unfinished: Set[int], exempt: Set[int] = frozenset()
    ) -> frozenset[int]:
        """Return the trials that can no longer be promoted, given that no trial is running.

        Args:
            reports: The reports of all trials, including finished ones.
            unfinished: The trials that have not ended.
            exempt: The trials that never pause and train to the end.
        """


def minimize_of(spec: SweepSpec) -> Minimize:
    """Return whether less of the metric is better; with several metrics, for each."""
    lows = tuple(mode == "min" for mode in spec.modes)
    return lows if len(lows) > 1 else lows[0]


def make_pausing_rule(spec: SweepSpec) -> PausingRule | None:
    """Return when the trials of a sweep pause and which is promoted; None: no trial pauses."""
    rule = spec.early_stopping.rule.pausing(
        epochs=spec.budget.reports,
        minimize=minimize_of(spec),
        num_trials=spec.num_trials,
    )
    return None if rule is None else replace(rule, patience=spec.patience)
