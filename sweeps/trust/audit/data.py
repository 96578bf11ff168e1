"""What the audit looks at, as plain data: built from a sweep (`read`), or by hand in a test.

What must not live here: reading files (`read`), and what the numbers mean (the cards).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sweeps.spec.space import Distribution
from sweeps.trust.evidence import NearBound, Region
from sweeps.trust.importance import final_places, importance

if TYPE_CHECKING:
    from sweeps.statistics.common_seeds import NoiseFloor
    from sweeps.statistics.variance_shares import VarianceShares

Continue = Callable[[Sequence[Region], Sequence[NearBound]], Sequence[str]]


@dataclass(frozen=True)
class Clipping:
    """How often a trial's gradients were clipped."""

    max_norm: float | None
    """The clipping norm with which it trained; None: it clipped no norm."""
    share: float
    """The share of its steps that were clipped, from 0 to 1."""
    steps: int
    """From how many steps the share is."""
    usual_norm: float | None = None
    """The 90th percentile of its gradient norms; None if it logged none."""


@dataclass(frozen=True)
class AuditTrial:
    """One trial of the search."""

    number: int
    state: str
    """`complete`, `pruned` or `failed`; trials that have not ended are no part of an audit."""
    params: Mapping[str, Any]
    """The parameters of its value, by dotted key."""
    value: float | None
    """Its value, by the one definition of a trial's value; None without a report."""
    curve: Mapping[int, float] = field(default_factory=dict)
    """The metric after each report, counted from 1."""
    counts: bool = True
    """Whether it counts among the best."""
    stopped_early: bool = False
    """Whether early stopping ended it, and not the user or the end of the sweep."""
    exempt: bool = False
    """Whether it was drawn to run to the end whatever early stopping says."""
    finished_value: float | None = None
    """For a stopped trial that was later trained to its end: its value at the end."""
    clipping: Clipping | None = None
    """None if it logged no share of clipped steps, or was not looked at."""

    @property
    def end(self) -> int:
        """Its last report; 0 without one."""
        return max(self.curve, default=0)

    @property
    def diverged(self) -> bool:
        """Whether it failed, or reported a value that is not finite."""
        return self.state == "failed" or not all(map(math.isfinite, self.curve.values()))


@dataclass(frozen=True, kw_only=True)
class AuditData:
    """One sweep with a single metric, as the cards look at it."""

    trials: Sequence[AuditTrial]
    """The ended trials of the search, in the order of their numbers."""
    space: Mapping[str, Distribution] = field(default_factory=dict)
    metric: str = "val/loss"
    minimize: bool = True
    reports: int = 1
    """The reports of a full run."""
    word: str = "epoch"
    """What one report is called."""
    seed_word: str = "seed"
    """What one training of a configuration is called: `seed` or `fold`."""
    rungs: Sequence[int] = ()
    """The reports at which early stopping compares trials; empty without such a rule."""
    can_exempt: bool = True
    """Whether trials of this sweep can be exempt from early stopping."""
    reduction: int = 3
    """One trial in this many continues beyond a rung."""
    repeats: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """For trials that were trained again: by number, the value under each common seed."""
    tied: Sequence[int] | None = None
    """Whom common seeds cannot tell apart, or their winner alone; None: none has ended."""
    num_validation: int | None = None
    """How many validation samples there are; None if that is unknown."""
    population: bool = False
    """Whether trials changed their parameters while they trained."""
    select_final: bool = False
    """Whether a trial's value is its last one, and not its best one."""
    constraints: Sequence[str] = ()
    """The constraints of the space."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Short names of parameters; a parameter without one has its key."""
    overrides: Continue = lambda _regions, _bounds: ()
    """Returns overrides of a resume that narrow bad regions and widen bounds; none if the sweep
    cannot be resumed so."""

    @cached_property
    def noise_floor(self) -> NoiseFloor | None:
        """The standard deviation over seeds of one configuration; None without two seeds."""
        from sweeps.statistics.common_seeds import noise_floor, table_of  # slow to import

        return noise_floor(table_of(self.repeats)) if self.repeats else None

    def name(self, key: str) -> str:
        """Return how sentences call a parameter."""
        return self.names.get(key, key)

    def loss(self, value: float) -> float:
        """Return a value of which less is better."""
        return value if self.minimize else -value

    @property
    def ranked(self) -> list[AuditTrial]:
        """The trials that count among the best, the best first."""
        found = [t for t in self.trials if t.counts and t.value is not None]
        found = [t for t in found if math.isfinite(t.value or 0.0)]
        return sorted(found, key=lambda t: (self.loss(t.value or 0.0), t.state != "complete"))

    def all_equal(self, losses: Sequence[float]) -> str | None:
        """Return a sentence if several results are all the same, so that they rank no trial."""
        if len(losses) < 2 or len(set(losses)) > 1:
            return None
        return f"All {len(losses)} trials with a result have the same {self.metric}."

    @property
    def params(self) -> dict[int, Mapping[str, Any]]:
        """The parameters by trial; none if trials changed theirs."""
        return {} if self.population else {t.number: t.params for t in self.trials}

    @cached_property
    def places(self) -> dict[int, float]:
        """The place of each trial that did not fail in the final order."""
        # Without curves, the values of whole trainings are compared.
        curves = {
            t.number: t.curve or {1: math.nan if t.value is None else t.value}
            for t in self.trials
            if t.state != "failed"
        }
        return final_places(curves, minimize=self.minimize, final=self.select_final)

    @cached_property
    def importance(self) -> VarianceShares | None:
        """What mattered; None if too few trials tell."""
        return importance(self.space, self.params, self.places) if self.params else None

    def comparable(self) -> tuple[int, dict[int, float]]:
        """Return the last report that all ended trials made, and their losses by it, by number."""
        sound = [t for t in self.trials if not t.diverged and t.value is not None]
        # With early stopping, the lowest rung at which one was stopped.
        at = min((t.end for t in sound), default=0)
        if at == 0:  # without curves, the values of whole trainings are compared
            return 0, {t.number: self.loss(t.value or 0.0) for t in sound}
        found = {}
        for trial in sound:
            until = [self.loss(value) for epoch, value in trial.curve.items() if epoch <= at]
            if until:
                last = self.loss(trial.curve[at]) if at in trial.curve else until[-1]
                found[trial.number] = last if self.select_final else min(until)
        return at, found


def top_fifth(ranked: Sequence[AuditTrial]) -> list[AuditTrial]:
    """Return the best fifth of trials, rounded up."""
    return list(ranked[: math.ceil(len(ranked) / 5)])
