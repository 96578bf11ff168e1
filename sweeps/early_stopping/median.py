"""The median stopping rule, over what trials have reported so far.

What must not live here: Ray, and anything that starts or ends a trial.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from fractions import Fraction
from statistics import median

from sweeps.ledger.reader import best_report


class Medians:
    """Says who is worse than the median of the others, in a time that hardly grows with their
    number.

    Args:
        grace: Epochs that every trial gets, and from which on means are taken.
        min_trials: How many others must have come as far before a trial is stopped.
        minimize: Whether less is better.
    """

    def __init__(self, grace: int, min_trials: int, *, minimize: bool) -> None:
        self._grace, self._min_trials, self._minimize = grace, min_trials, minimize
        self._reports: dict[int, dict[int, float]] = {}
        self._totals: dict[int, tuple[Fraction, int] | None] = {}
        """By trial, the sum of its values from the grace on, and of how many; None: one of them is
        not finite. It is exact: the mean of equal values is not to differ from them.
        """
        self._ranked: dict[int, list[float]] = {}
        """By epoch, the means of all trials up to it, ascending."""

    def note(self, number: int, epoch: int, value: float) -> None:
        """A trial reported; an epoch that it reports again is left as it was first told."""
        reports = self._reports.setdefault(number, {})
        if epoch in reports:
            return
        reports[epoch] = value
        if epoch >= self._grace:
            sound = self._totals.get(number, (Fraction(), 0)) if math.isfinite(value) else None
            self._totals[number] = sound and (sound[0] + Fraction(value), sound[1] + 1)
            if (mean := self._mean(number)) is not None:
                insort(self._ranked.setdefault(epoch, []), mean)

    def stops(self, number: int) -> bool:
        """Whether a trial is stopped at its last report.

        It is when its best value so far is worse than the median of the others' mean values up to
        the same epoch (Golovin et al., "Google Vizier", 2017, section 3.2.2).
        """
        reports = self._reports[number]
        others = list(self._ranked.get(max(reports), ()))
        if (own := self._mean(number)) is not None:
            place = bisect_left(others, own)
            if others[place : place + 1] == [own]:
                del others[place]
        if len(others) < self._min_trials:
            return False
        value = best_report(reports.values(), minimize=self._minimize)
        middle = median(others)
        return value is None or (value > middle if self._minimize else value < middle)

    def _mean(self, number: int) -> float | None:
        """The mean of what a trial has reported from the grace on; None: it has none."""
        known = self._totals.get(number)
        return None if known is None else float(known[0] / known[1])
