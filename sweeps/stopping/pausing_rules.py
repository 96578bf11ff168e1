"""The interface of rules whose trials pause at rungs until they are promoted.

What must not live here: a particular rule (`halving`, `pbt`), Ray, and the ledger.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sweeps.stopping.metric_values import Minimize, Value

if TYPE_CHECKING:  # this package lies below the specs
    from sweeps.spec.spec import SweepSpec

Reports = Mapping[int, Mapping[int, Value]]
"""By trial, the metric after each reported epoch, or with several metrics all values."""


class Standing(NamedTuple):
    """What a sweep knows of its trials when it decides which go on.

    Attributes:
        reports: The reports of all trials, including finished ones.
        unfinished: The trials that have not ended.
        live: Those of them that go on from their last report: they run, were promoted, or a driver
            has let them go on.
        exempt: The trials that are exempt from early stopping.
        complete: The trials that have trained to their end. It may lie before the budget: by
            `patience`, or because a loop of the user ends by itself.
    """

    reports: Reports
    unfinished: Set[int]
    live: Set[int] = frozenset()
    exempt: Set[int] = frozenset()
    complete: Set[int] = frozenset()


StopDecider = Callable[[Standing], Mapping[int, str]]
"""Returns which unfinished trials stop at their last report, and why, as the driver would have
decided that died. An exempt trial would stop there."""


@dataclass(frozen=True, kw_only=True)
class PausingRule(ABC):
    """The rungs of a sweep whose trials pause at each one until they are promoted.

    A pausing rule keeps no state between two calls. A driver that resumes a sweep therefore
    decides as the earlier driver did.

    Attributes:
        rungs: Epochs at which a trial pauses, ascending.
        minimize: Whether less is better; with several metrics, for each.
        num_trials: How many trials the sweep will have.
    """

    rungs: tuple[int, ...]
    minimize: Minimize
    num_trials: int

    def pause_at_epoch(self, epoch: int) -> int | None:
        """Return the next rung after an epoch; None: the trial trains to the end."""
        return next((rung for rung in self.rungs if rung > epoch), None)

    def pauses_at(self, reports: Mapping[int, Value]) -> bool:
        """Return whether an unfinished trial with these reports waits for its promotion."""
        return max(reports, default=0) in self.rungs

    @abstractmethod
    def next_promotion(self, now: Standing) -> int | None:
        """Return the trial that resumes next; None while all trials must wait."""

    @abstractmethod
    def never_promoted(self, now: Standing) -> frozenset[int]:
        """Return the trials that can no longer be promoted, given that no trial is running."""


def minimize_of(spec: SweepSpec) -> Minimize:
    """Return whether less of the metric is better; with several metrics, for each."""
    lows = tuple(mode == "min" for mode in spec.modes)
    return lows if len(lows) > 1 else lows[0]


def make_pausing_rule(spec: SweepSpec) -> PausingRule | None:
    """Return when the trials of a sweep pause and which is promoted; None: no trial pauses."""
    return spec.early_stopping.rule.pausing(
        epochs=spec.budget.reports,
        minimize=minimize_of(spec),
        num_trials=spec.num_trials,
    )
