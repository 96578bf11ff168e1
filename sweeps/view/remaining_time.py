"""Estimate how long a sweep still takes: its training, and the delivery of its records.

What must not live here: following a sweep (`sweep_progress`), and text.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from sweeps.ledger.trials import of_search
from sweeps.paths import SweepPaths
from sweeps.spec.spec import SweepSpec
from sweeps.stopping.halving import SuccessiveHalving
from sweeps.stopping.pausing_rules import make_pausing_rule
from sweeps.view.sweep_view import SweepView
from tracking.outbox_status import backlog

MAX_DELIVERY_SECONDS = 60.0
"""For how long a driver waits at its end until its records are delivered."""
_USUAL_RATE = 50.0
"""Delivered records a second, until the speed of the store is known."""


def epochs_left(
    spec: SweepSpec,
    ended: Mapping[int, int],
    unfinished: Sequence[int],
    num_unstarted: int,
    finishing: Sequence[int] = (),
) -> float:
    """Return how many epochs the sweep probably still trains."""
    budget = spec.budget.reports
    whole_trials = sum(budget - epoch for epoch in finishing)
    pausing = make_pausing_rule(spec)
    if isinstance(pausing, SuccessiveHalving):  # the trials that end first are the longest
        whole = _epochs_of_halving(pausing, budget)
        num_ended, done = _total(ended)
        most = (num_ended + len(unfinished) + num_unstarted) * whole
        return max(most - done - sum(unfinished), 0.0) + whole_trials
    if pausing is not None:
        ended = {}  # a population trains to the end
    started = sum(_expected(epoch, ended, budget) - epoch for epoch in unfinished)
    return whole_trials + started + num_unstarted * _expected(0, ended, budget)


def _expected(epoch: int, ended: Mapping[int, int], budget: int) -> float:
    """Return how many epochs a trial trains that has trained some already."""
    number, epochs = _total({one: count for one, count in ended.items() if one > epoch})
    return epochs / number if number else float(max(budget, epoch))


def _total(ended: Mapping[int, int]) -> tuple[int, int]:
    """Return how many trials have ended, and how many epochs they trained."""
    return sum(ended.values()), sum(epochs * count for epochs, count in ended.items())


def _epochs_of_halving(rule: SuccessiveHalving, budget: int) -> float:
    """Return how many epochs a trial trains on average."""
    bounds = [0, *rule.rungs, budget]
    lengths = (end - start for start, end in pairwise(bounds))
    shares = (float(rule.reduction) ** -index for index in range(len(bounds)))
    return sum(length * share for length, share in zip(lengths, shares, strict=False))


def seconds_left(view: SweepView, delivery: DeliveryEstimate) -> float | None:
    """Return how long a sweep that another process runs probably still takes.

    None before its first epochs, and if all of its trials have ended.
    """
    searched = of_search(view.records)
    ended = Counter(record.epoch for record in searched if record.finished)
    unfinished = [record.epoch for record in searched if not record.finished]
    finishing = [r.epoch for r in view.records if r.role != "search" and not r.finished]
    done = _total(ended)[1] + sum(unfinished)
    num_unstarted = view.num_left - len(unfinished) - len(finishing)
    if not (done and view.ledger.seconds and view.num_left):
        return None
    left = epochs_left(view.spec, ended, unfinished, num_unstarted, finishing)
    training = left * view.ledger.seconds / done
    return training + delivery.seconds(training)


class DeliveryEstimate:
    """Estimate how long the delivery of records lasts beyond the training."""

    def __init__(
        self,
        backlog: Callable[[], tuple[int, int]],
        *,
        clock: Callable[[], float] = time.monotonic,
        every: float = 2.0,
    ) -> None:
        self._backlog, self._clock, self._every = backlog, clock, every
        self._started = self._looked = clock()
        self._waiting, self._first = backlog()
        self._waiting_at_start = self._waiting
        self._rate = _USUAL_RATE

    @classmethod
    def of(cls, paths: SweepPaths) -> DeliveryEstimate:
        """Return the estimate for the outbox of a sweep."""
        return cls(lambda: backlog(paths.outbox))

    def seconds(self, training: float) -> float:
        """Return the seconds from the end of training until all records are delivered."""
        if self._clock() - self._looked >= self._every:
            self._look()
        if not self._waiting:
            return 0.0
        elapsed = max(self._looked - self._started, self._every)
        growth = (self._waiting - self._waiting_at_start) / elapsed
        at_the_end = max(self._waiting + growth * training, 0.0)
        return min(at_the_end / self._rate, MAX_DELIVERY_SECONDS)

    def _look(self) -> None:
        now, before, first = self._clock(), self._waiting, self._first
        self._waiting, self._first = self._backlog()
        # An empty queue keeps up, and says nothing about how fast it could be.
        if before and self._waiting and self._first > first:
            self._rate = (self._first - first) / (now - self._looked)
        self._looked = now
