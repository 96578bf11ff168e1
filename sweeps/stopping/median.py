"""The rule `median`: stop a trial that is worse than the median of the others.

What must not live here: Ray, the ledger, and anything that starts or ends a trial.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from fractions import Fraction
from statistics import median
from typing import ClassVar

from pydantic import Field

from sweeps.formatting import format_number
from sweeps.statistics.feasibility import INFEASIBLE_LOSS
from sweeps.stopping.asha import GeometricRungs
from sweeps.stopping.metric_values import (
    Minimize,
    Value,
    first_minimize,
    first_value,
    format_needed,
)
from sweeps.stopping.rule import TrialStopper


class MedianStopping(GeometricRungs):
    """Stop a trial after any epoch from `grace_epochs` on if it is worse than the median.

    The rule has no rungs of its own. A sampler compares trials at the epochs that ASHA's
    rungs would have.
    """

    name: ClassVar[str] = "median"
    description: ClassVar[str] = "stops a trial that is worse than the median of the others."
    decides_per_report: ClassVar[bool] = True
    needs_one_metric: ClassVar[bool] = True

    min_trials: int = Field(default=3, ge=1)
    """`median`: how many other trials must have trained as far before a trial is stopped."""

    def rungs(self, epochs: int) -> tuple[int, ...]:
        """Return none: the rule decides after each epoch."""
        del epochs
        return ()

    def no_rungs_reason(self) -> str:
        """Return at which epochs the rule decides instead of at rungs."""
        return (
            "the median rule has no rungs: it decides at the end of each epoch, from epoch "
            f"{self.grace_epochs} on"
        )

    def make_stopper(self, *, epochs: int, minimize: Minimize) -> TrialStopper | None:
        """Return a new stopper, which has seen no reports."""
        del epochs
        return Medians(self.grace_epochs, self.min_trials, minimize=first_minimize(minimize))


class Medians:
    """Compare each trial with the median of the others.

    The time for one report hardly grows with the number of trials.
    """

    def __init__(self, grace: int, min_trials: int, *, minimize: bool) -> None:
        self._grace, self._min_trials, self._minimize = grace, min_trials, minimize
        self._reports: dict[int, dict[int, float]] = {}
        self._totals: dict[int, tuple[Fraction, int] | None] = {}
        """By trial, the sum and the count of its values from `grace` on; None: a value is not
        finite. The sum is exact, so that the mean of equal values equals these values.
        """
        self._ranked: dict[int, list[float]] = {}
        """By epoch, the means of all trials up to that epoch, ascending."""

    def stops(self, number: int, epoch: int, value: Value) -> str | None:
        """Record a report; return why its trial stops, or None if it continues.

        A trial stops when its best value so far is worse than the median of the other trials'
        mean values up to the same epoch. See Golovin et al., "Google Vizier" (2017), section
        3.2.2.
        """
        self._record(number, epoch, first_value(value))
        reports = self._reports[number]
        others = list(self._ranked.get(max(reports), ()))
        if (own := self._mean(number)) is not None:
            index = bisect_left(others, own)
            if others[index : index + 1] == [own]:
                del others[index]
        if len(others) < self._min_trials:
            return None
        finite = filter(math.isfinite, reports.values())
        best = (min if self._minimize else max)(finite, default=None)
        middle = median(others)
        if best is not None and (best <= middle if self._minimize else best >= middle):
            return None
        words = "at most" if self._minimize else "at least"
        is_infeasible = best is not None and abs(best) >= INFEASIBLE_LOSS
        mine = "" if is_infeasible else f"best {format_number(best)}, "
        needed = format_needed(words, middle)
        return f"{mine}needed {needed}, the median of {len(others)} others"

    def _record(self, number: int, epoch: int, value: float) -> None:
        """Record a report; an epoch that is reported again keeps its first value."""
        reports = self._reports.setdefault(number, {})
        if epoch in reports:
            return
        reports[epoch] = value
        if epoch >= self._grace:
            total = self._totals.get(number, (Fraction(), 0)) if math.isfinite(value) else None
            self._totals[number] = total and (total[0] + Fraction(value), total[1] + 1)
            if (mean := self._mean(number)) is not None:
                insort(self._ranked.setdefault(epoch, []), mean)

    def _mean(self, number: int) -> float | None:
        """Return the mean of a trial's reports from `grace` on; None if it has no mean."""
        total = self._totals.get(number)
        return None if total is None else float(total[0] / total[1])
