"""Pausing, and successive halving, as pure functions of what trials reported: rungs, who is
promoted, who is left behind, and HyperBand's brackets.

Nothing is remembered between two calls: whatever was decided before shows in the reports, so a
driver that starts anew decides as the one before it did. What must not live here: Ray, the
ledger, samplers, and anything that starts or ends a trial.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Literal

Mode = Literal["min", "max"]
Reports = Mapping[int, Mapping[int, float]]
"""By trial, the metric after each reported epoch."""
Judge = Callable[[Reports, Set[int]], frozenset[int]]
"""Says which unfinished trials the scheduler stops at their last report, given all reports."""


def rungs(grace: int, reduction: int, epochs: int) -> tuple[int, ...]:
    """Return the epochs at which trials are compared, ascending and below the budget.

    Args:
        grace: The first one.
        reduction: The factor between two.
        epochs: The budget of a full run.
    """
    found = []
    while grace < epochs:
        found.append(grace)
        grace *= reduction
    return tuple(found)


def promotable(
    waiting: Mapping[int, float],
    *,
    num_seen: int,
    num_promoted: int,
    reduction: int,
    minimize: bool,
) -> list[int]:
    """Return the trials that may leave a rung now, the best first.

    Of `num_seen` trials at a rung at most `num_seen // reduction` go on, so a sweep costs what
    successive halving costs. Algorithm 2 of Li et al., "A System for Massively Parallel
    Hyperparameter Tuning" (2020), has no such bound: there, who was promoted too early goes on
    beside those who were found to be better later.

    Args:
        waiting: By trial, the value of those that were not promoted and can go on. Of equals the
            lower number is better; what is not finite is never promoted.
        num_seen: How many trials have come to the rung, whatever became of them.
        num_promoted: How many of them went on.
    """
    free = num_seen // reduction - num_promoted
    sound = [number for number, value in waiting.items() if math.isfinite(value)]
    ranked = sorted(sound, key=lambda n: (waiting[n] if minimize else -waiting[n], n))
    return ranked[: max(free, 0)]


@dataclass(frozen=True, kw_only=True)
class PausingRule(ABC):
    """The rungs of a sweep whose trials pause at each one until they may go on.

    Attributes:
        rungs: Epochs at which a trial pauses, ascending.
        minimize: Whether less is better.
        num_trials: How many trials the sweep shall have.
    """

    rungs: tuple[int, ...]
    minimize: bool
    num_trials: int

    def pause_at_epoch(self, epoch: int) -> int | None:
        """Return the rung at which a trial pauses that goes on from an epoch; None: the end."""
        return next((rung for rung in self.rungs if rung > epoch), None)

    def pauses_at(self, reports: Mapping[int, float]) -> bool:
        """Whether a trial that has not ended waits for its promotion, as far as reports tell."""
        return max(reports, default=0) in self.rungs

    @abstractmethod
    def next_promotion(
        self, reports: Reports, unfinished: Set[int], live: Set[int] = frozenset()
    ) -> int | None:
        """Return the trial that is to go on next; None while all have to wait.

        Args:
            reports: Of all trials, whatever became of them.
            unfinished: Trials without an end.
            live: Those of them that are being worked on.
        """

    @abstractmethod
    def never_promoted(self, reports: Reports, unfinished: Set[int]) -> frozenset[int]:
        """Return the trials that nothing can promote any more, while nobody works on any.

        Args:
            reports: Of all trials.
            unfinished: Trials without an end.
        """


@dataclass(frozen=True, kw_only=True)
class SuccessiveHalving(PausingRule):
    """Of the trials at a rung the best go on; one of them trains to the end in any case.

    Attributes:
        reduction: One trial in this many goes on.
        epochs: The budget of a full run.
    """

    reduction: int
    epochs: int

    def next_promotion(
        self, reports: Reports, unfinished: Set[int], live: Set[int] = frozenset()
    ) -> int | None:
        """Return the trial that is to be promoted first, from the highest rung that has one."""
        last = {number: max(epochs, default=0) for number, epochs in reports.items()}
        for rung in reversed(self.rungs):
            seen = [number for number in reports if rung in reports[number]]
            waiting = {
                number: reports[number][rung]
                for number in seen
                if last[number] == rung and number in unfinished and number not in live
            }
            gone = [n for n in seen if last[n] > rung or (last[n] == rung and n in live)]
            if found := promotable(
                waiting,
                num_seen=len(seen),
                num_promoted=len(gone),
                reduction=self.reduction,
                minimize=self.minimize,
            ):
                return found[0]
        return None if live else self._last_hope(reports, unfinished, last)

    def _last_hope(
        self, reports: Reports, unfinished: Set[int], last: Mapping[int, int]
    ) -> int | None:
        """Return the best of the highest rung where nobody would train to the end: of few trials
        no rung may have enough for one to go on.
        """
        waiting = all(self.pauses_at(reports[number]) for number in unfinished)
        if len(reports) < self.num_trials or not waiting:
            return None
        if any(epoch >= self.epochs for epoch in last.values()):
            return None
        for rung in reversed(self.rungs):
            found = promotable(
                {n: reports[n][rung] for n in unfinished if last[n] == rung},
                num_seen=1,
                num_promoted=0,
                reduction=1,
                minimize=self.minimize,
            )
            if found:
                return found[0]
        return None

    def never_promoted(self, reports: Reports, unfinished: Set[int]) -> frozenset[int]:
        over = (
            len(reports) >= self.num_trials
            and all(self.pauses_at(reports[number]) for number in unfinished)
            and self.next_promotion(reports, unfinished) is None
        )
        return frozenset(unfinished) if over else frozenset()


def bracket_graces(grace: int, reduction: int, epochs: int) -> tuple[int, ...]:
    """Return the first rung of each of HyperBand's brackets, the most eager one first.

    The last one has no rung below the budget: its trials are never stopped.
    """
    return (*rungs(grace, reduction, epochs), epochs)


def brackets(graces: Sequence[int], reduction: int) -> Iterator[int]:
    """Yield the bracket of trial 0, 1 and so on, by index: a function of the number alone.

    The brackets get their shares in turn, in the proportions of Li et al., "Hyperband" (2018):
    with S + 1 brackets, the one that still has s rungs gets (S + 1) / (s + 1) * reduction**s.
    """
    top = len(graces) - 1
    shares = [
        (top + 1) / (top - index + 1) * reduction ** (top - index) for index in range(top + 1)
    ]
    given = [0] * len(shares)
    while True:
        index = min(range(len(shares)), key=lambda i: (given[i] + 0.5) / shares[i])
        given[index] += 1
        yield index


def bracket_of(number: int, graces: Sequence[int], reduction: int) -> int:
    """Return the bracket of a trial, by index."""
    known, further = _assigned(tuple(graces), reduction)
    known += islice(further, max(0, number + 1 - len(known)))
    return known[number]


@cache  # asked at each report of each trial
def _assigned(graces: tuple[int, ...], reduction: int) -> tuple[list[int], Iterator[int]]:
    """Return the brackets that were asked for by now, and those of the trials after them."""
    return [], brackets(graces, reduction)
