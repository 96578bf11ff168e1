"""Successive halving as pure functions of the trials' reports: rungs, promotions, brackets.

No state remains between two calls: the ledger has every earlier decision, in the reports or as a
promotion before the next one. A driver that resumes a sweep therefore decides as the earlier
driver did. What must not live here: Ray, the ledger, samplers, and anything that starts or ends a
trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import islice

from sweeps.stopping.metric_values import as_losses
from sweeps.stopping.rule import PausingRule, Reports, Standing

_LAST_RUNG = 0.8
"""The share of the budget after which no rung lies."""


def rungs(grace: int, reduction: int, epochs: int) -> tuple[int, ...]:
    """Return the epochs at which trials are compared, ascending.

    No rung lies in the last fifth of the budget, where stopping a trial saves almost nothing.
    """
    found = []
    while grace <= _LAST_RUNG * epochs and grace < epochs:
        found.append(grace)
        grace *= reduction
    return tuple(found)


def goes_on_among_equals(num_seen: int, reduction: int) -> bool:
    """Return whether the newest trial at a rung continues if it equals the last that may.

    It does at the first, and then whenever one more trial may continue than before. So of trials
    that are all equal one in `reduction` continues, as of trials that differ. To let only the
    earliest continue would leave a sweep with one trial where the first epochs show nothing.
    """
    return num_seen == 1 or (num_seen > 2 and (num_seen - 2) % reduction == 0)


def promotable(
    waiting: Mapping[int, float],
    *,
    num_seen: int,
    num_promoted: int,
    reduction: int,
    minimize: bool,
) -> list[int]:
    """Return the trials that may leave a rung now, the best first.

    Of `num_seen` trials at a rung at most `num_seen // reduction` resume, so a sweep costs what
    successive halving costs. Algorithm 2 of Li et al., "A System for Massively Parallel
    Hyperparameter Tuning" (2020), has no such bound. There, a trial that was promoted too early
    continues in addition to trials that are later found to be better.
    """
    free = num_seen // reduction - num_promoted
    finite = [number for number, value in waiting.items() if math.isfinite(value)]
    ranked = sorted(finite, key=lambda n: (waiting[n] if minimize else -waiting[n], n))
    return ranked[: max(free, 0)]


@dataclass(frozen=True, kw_only=True)
class SuccessiveHalving(PausingRule):
    """Promote one in `reduction` trials at each rung, the best; at least one trains to the end."""

    reduction: int

    def next_promotion(self, now: Standing) -> int | None:
        """Return the best trial of the highest rung that may promote one; see the base class."""
        reports, unfinished, live, exempt, complete = now
        last = {number: max(epochs, default=0) for number, epochs in reports.items()}
        at_rungs = list(self._at_rungs(reports, exempt))
        for rung, seen, num_passed in reversed(at_rungs):
            others = [number for number in seen if number not in exempt]
            waiting = [n for n in others if last[n] == rung and n in unfinished and n not in live]
            gone = [n for n in others if last[n] > rung or (last[n] == rung and n in live)]
            num_promoted = len(gone) + num_passed
            if not waiting or len(seen) // self.reduction <= num_promoted:
                continue
            ranked = as_losses({n: reports[n][rung] for n in seen}, self.minimize)
            if found := promotable(
                {n: ranked[n] for n in waiting if n in ranked},
                num_seen=len(seen),
                num_promoted=num_promoted,
                reduction=self.reduction,
                minimize=True,
            ):
                return found[0]
        if complete - exempt or not self._all_wait(now):
            return None
        return self._best_if_none_finishes(reports, unfinished)

    def _at_rungs(
        self, reports: Reports, exempt: Set[int]
    ) -> Iterator[tuple[int, list[int], int]]:
        """Yield each rung, the trials that count there, and how many exempt ones pass it.

        An exempt trial counts at a rung as long as it would have been promoted at each one before.
        So the other trials are promoted as they would be if none were exempt.
        """
        passing = exempt
        for rung in self.rungs:
            seen = [n for n in reports if rung in reports[n] and (n not in exempt or n in passing)]
            if here := passing & set(seen):
                ranked = as_losses({n: reports[n][rung] for n in seen}, self.minimize)
                best = sorted(ranked, key=lambda n: (ranked[n], n))[: len(seen) // self.reduction]
                passing = here & set(best)
            yield rung, seen, len(passing & here)

    def _best_if_none_finishes(self, reports: Reports, waiting: Set[int]) -> int | None:
        """Return the best trial of the highest rung, as otherwise none would train to the end.

        In a sweep with few trials, it may be that no rung has enough trials to promote one. An
        exempt trial trains to the end whether it is good or not, and so does not count.
        """
        for rung in reversed(self.rungs):
            found = promotable(
                as_losses(
                    {n: reports[n][rung] for n in waiting if max(reports[n]) == rung},
                    self.minimize,
                ),
                num_seen=1,
                num_promoted=0,
                reduction=1,
                minimize=True,
            )
            if found:
                return found[0]
        return None

    def _all_wait(self, now: Standing) -> bool:
        """Return whether all trials exist, and each unfinished one waits for its promotion."""
        return (
            len(now.reports) >= self.num_trials
            and not now.unfinished & (now.live | now.exempt)
            and all(self.pauses_at(now.reports[n]) for n in now.unfinished)
        )

    def never_promoted(self, now: Standing) -> frozenset[int]:
        """Return all unfinished trials if each of them waits and none may be promoted."""
        over = self._all_wait(now) and self.next_promotion(now) is None
        return frozenset(now.unfinished) if over else frozenset()


def bracket_graces(grace: int, reduction: int, epochs: int) -> tuple[int, ...]:
    """Return the first rung of each bracket of HyperBand, ascending.

    The last bracket has no rung below the budget, so its trials are never stopped.
    """
    return (*rungs(grace, reduction, epochs), epochs)


def brackets(graces: Sequence[int], reduction: int) -> Iterator[int]:
    """Yield the index of the bracket of trial 0, of trial 1, and so on.

    A trial's number alone determines its bracket. The brackets receive trials in the proportions
    of Li et al., "Hyperband" (2018). Of S + 1 brackets, the bracket with s rungs below the budget
    gets the share (S + 1) / (s + 1) * reduction**s.
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
    """Return the index of a trial's bracket; see `brackets`."""
    known, further = _assigned(tuple(graces), reduction)
    known += islice(further, max(0, number + 1 - len(known)))
    return known[number]


@cache  # called at each report of each trial with HyperBand
def _assigned(graces: tuple[int, ...], reduction: int) -> tuple[list[int], Iterator[int]]:
    """Return the known brackets, and an iterator over those of all later trials."""
    return [], brackets(graces, reduction)
