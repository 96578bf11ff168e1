"""ASHA, asynchronous successive halving: the rules `asha` and `asha_promote`.

Here are also the parameters of all halving rules, and stoppers for one metric and for several.
What must not live here: where the rungs are, and which trial is promoted (`halving`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import ClassVar

from pydantic import Field

from sweeps.stopping.halving import SuccessiveHalving, goes_on_among_equals, rungs
from sweeps.stopping.metric_values import (
    Minimize,
    Value,
    first_value,
    format_needed,
    is_finite,
    losses,
    own_volumes,
    worst_of,
)
from sweeps.stopping.rule import PausingRule, StoppingRule, TrialStopper


class GeometricRungs(StoppingRule):
    """Base of the rules with a first rung and a constant factor between two rungs."""

    first_epoch_key: ClassVar[str | None] = "grace_epochs"
    needs_one_metric: ClassVar[bool] = False

    grace_epochs: int = Field(default=1, ge=1)
    """Epochs that every trial gets; below `budget.epochs`. With another budget: reports."""
    reduction: int = Field(default=3, ge=2)
    """One trial in this many continues beyond a rung; also the factor between two rungs."""

    def rungs(self, epochs: int) -> tuple[int, ...]:
        """Return the geometric rungs below the budget."""
        return rungs(self.grace_epochs, self.reduction, epochs)

    def comparable_epochs(self, epochs: int) -> tuple[int, ...]:
        """Return the geometric rungs and the end of the budget."""
        return (*rungs(self.grace_epochs, self.reduction, epochs), epochs)


class Asha(GeometricRungs):
    """Stop a trial at a rung unless it is among the best there so far."""

    name: ClassVar[str] = "asha"
    description: ClassVar[str] = (
        "stops a trial at a rung unless it is among the best 1/`reduction` there so far."
    )
    decides_per_report: ClassVar[bool] = True

    def make_stopper(self, *, epochs: int, minimize: Minimize) -> TrialStopper | None:
        """Return a new stopper, which has seen no reports."""
        return halving_stopper([self.rungs(epochs)], self.reduction, minimize=minimize)


def halving_stopper(
    brackets: Sequence[Sequence[int]],
    reduction: int,
    *,
    bracket_of: Callable[[int], int] = lambda _: 0,
    minimize: Minimize,
) -> TrialStopper:
    """Return a stopper for one metric or for several; see `HalvingStopper`."""
    if isinstance(minimize, tuple):
        return FrontStopper(brackets, reduction, bracket_of=bracket_of, minimize=minimize)
    return HalvingStopper(brackets, reduction, bracket_of=bracket_of, minimize=minimize)


class _RungStopper:
    """Base of the stoppers that compare each trial once at each rung of its bracket."""

    def __init__(
        self,
        brackets: Sequence[Sequence[int]],
        reduction: int,
        *,
        bracket_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self._brackets = brackets
        self._reduction, self._bracket_of = reduction, bracket_of
        self._last_rung: dict[int, int] = {}
        """By trial number, the highest rung at which the trial was compared."""

    def _new_rung(self, number: int, epoch: int) -> tuple[int, int] | None:
        """Return the bracket and the rung at which a trial is compared now, if it is."""
        bracket = self._bracket_of(number)
        rung = max((one for one in self._brackets[bracket] if one <= epoch), default=0)
        return None if rung <= self._last_rung.get(number, 0) else (bracket, rung)


class HalvingStopper(_RungStopper):
    """Compare each trial at each rung with the trials that reached the rung before.

    A trial stops at a rung if its value is worse than a percentile of the earlier values there.
    This percentile separates the best 1/`reduction`, and is interpolated linearly. The first trial
    at a rung continues. This is the stopping variant of asynchronous successive halving, as in Ray
    Tune, but for trials that equal the percentile: see `goes_on_among_equals`.
    """

    def __init__(
        self,
        brackets: Sequence[Sequence[int]],
        reduction: int,
        *,
        bracket_of: Callable[[int], int] = lambda _: 0,
        minimize: bool,
    ) -> None:
        super().__init__(brackets, reduction, bracket_of=bracket_of)
        self._sign = 1 if minimize else -1
        self._losses: dict[tuple[int, int], list[float]] = {}
        """By bracket and rung, the values there, ascending; negated where more is better."""

    def stops(self, number: int, epoch: int, value: Value) -> str | None:
        """Record a report; return why its trial stops, or None if it continues."""
        value = first_value(value)
        if (at := self._new_rung(number, epoch)) is None:
            return None
        if not math.isfinite(value):
            return "not a finite number"
        self._last_rung[number] = at[1]
        losses, loss = self._losses.setdefault(at, []), self._sign * value
        cutoff = _percentile(losses, 1 / self._reduction) if losses else math.inf
        rank = bisect_left(losses, loss) + 1
        num_equal = bisect_right(losses, loss) + 1 - rank
        insort(losses, loss)
        if loss < cutoff or (loss == cutoff and not num_equal):
            return None
        equal = loss == cutoff
        if equal and goes_on_among_equals(len(losses), self._reduction):
            return None
        words = ("below", "at most") if self._sign > 0 else ("above", "at least")
        needed = format_needed(words[not equal], self._sign * cutoff)
        which = f" (of equal trials 1 in {self._reduction} continues)" if equal else ""
        best = f"the best 1/{self._reduction} so far"
        return f"needed {needed} to be in {best}{which}, rank {rank} of {len(losses)}"


def _percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, as `numpy.percentile` does."""
    position = share * (len(ascending) - 1)
    below, fraction = int(position), position % 1
    low, high = ascending[below], ascending[min(below + 1, len(ascending) - 1)]
    if fraction < 0.5:
        return low + (high - low) * fraction
    return high - (high - low) * (1 - fraction)


class AshaPromote(GeometricRungs):
    """Pause every trial at each rung, and promote the best."""

    name: ClassVar[str] = "asha_promote"
    description: ClassVar[str] = (
        "pauses every trial at each rung and promotes the best 1/`reduction`."
    )

    def pausing(self, *, epochs: int, minimize: Minimize, num_trials: int) -> PausingRule | None:
        """Return successive halving over the rungs of this rule."""
        return SuccessiveHalving(
            rungs=self.rungs(epochs),
            minimize=minimize,
            num_trials=num_trials,
            reduction=self.reduction,
        )


class FrontStopper(_RungStopper):
    """Compare each trial at each rung, by all metrics, with those that reached the rung before.

    The n-th trial at a rung continues if it is among the best (n - 1) / `reduction` there, rounded
    up, itself included; the first always. Of equal trials see `goes_on_among_equals`.
    With one metric this is `HalvingStopper` without the interpolation. Trials are ranked by
    non-dominated front, and within a front by the hypervolume that they alone dominate: Schmucker
    et al., "Multi-objective Asynchronous Successive Halving" (2021), with the tie-break of
    SMS-EMOA in place of the epsilon-net.
    """

    def __init__(
        self,
        brackets: Sequence[Sequence[int]],
        reduction: int,
        *,
        bracket_of: Callable[[int], int] = lambda _: 0,
        minimize: tuple[bool, ...],
    ) -> None:
        super().__init__(brackets, reduction, bracket_of=bracket_of)
        self._minimize = minimize
        self.name_of: Callable[[int], int] = int
        """Returns the number by which a reason names a trial."""
        self._seen: dict[tuple[int, int], dict[int, tuple[float, ...]]] = {}
        """By bracket and rung, the losses of the trials there, by number."""

    def stops(self, number: int, epoch: int, value: Value) -> str | None:
        """Record a report; return why its trial stops, or None if it continues."""
        if (at := self._new_rung(number, epoch)) is None:
            return None
        if not is_finite(value):
            return "not all finite numbers"
        self._last_rung[number] = at[1]
        import numpy as np  # only where it is needed

        from sweeps.statistics.fronts import fronts

        seen = self._seen.setdefault(at, {})
        seen[number] = losses(value, self._minimize)
        points, num_seen = np.array([*seen.values()]), len(seen)
        mine = points[-1]
        most = max(1, -(-(num_seen - 1) // self._reduction))
        better = 0
        for members in fronts(points):
            front = points[members]
            if members[-1] == num_seen - 1:
                break
            better += len(front)
        by_volume = better < most < better + len(front)
        if by_volume:
            volumes = own_volumes(front, worst_of(points))
            better += sum(one > volumes[-1] for one in volumes)  # the last is this trial
        equal = better < most
        num_equal = int((front == mine).all(axis=1).sum())  # itself included
        if equal and (
            num_equal == 1
            or better + num_equal <= most
            or goes_on_among_equals(num_seen, self._reduction)
        ):
            return None
        needed = f"needed rank {most}{' or better' * (most > 1)}"
        needed += f" to be in the best 1/{self._reduction} so far, rank {better + 1} of {num_seen}"
        if equal:
            return f"{needed} (of equal trials 1 in {self._reduction} continues)"
        if by_volume:
            count = f"of the {len(front)} trials of its non-dominated front"
            return f"{needed}: {count}, others add more hypervolume"
        dominates = (points <= mine).all(axis=1) & (points != mine).any(axis=1)
        return f"{needed}: {self._why(compress(seen, dominates))}"

    def _why(self, numbers: Iterable[int]) -> str:
        """Return which trials dominate one."""
        match found := sorted(map(self.name_of, numbers)):
            case [one]:
                who = f"trial {one} is"
            case [one, other]:
                who = f"trials {one} and {other} are"
            case _:
                who = f"trial {found[0]} and {len(found) - 1} others are"
        return f"{who} at least as good in every metric"
