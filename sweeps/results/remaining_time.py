"""Estimate how long a sweep still takes: its training, and the delivery of its records.

What must not live here: following a sweep (`sweep_progress`), and text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sweeps.config.spec import SweepSpec
from sweeps.early_stopping.halving import SuccessiveHalving
from sweeps.early_stopping.pausing_rules import make_pausing_rule
from sweeps.results.sweep_status import SweepStatus

MAX_DELIVERY_SECONDS = 60.0
"""For how long a driver waits at its end until its records are delivered."""


def epochs_left(
    spec: SweepSpec, ended: Sequence[int], unfinished: Sequence[int], num_unstarted: int
) -> float:
    """Return how many epochs the sweep probably still trains.

    Args:
        spec: The sweep.
        ended: The epochs of each trial that has ended. A new trial probably trains their mean.
        unfinished: The epochs so far of each trial that has started and not ended.
        num_unstarted: How many trials have not started.
    """
    expected = _expected_epochs(spec, ended)
    open_ = sum(
        max(expected - epoch, 1.0 if epoch < spec.budget.epochs else 0.0) for epoch in unfinished
    )
    return open_ + num_unstarted * expected


def _expected_epochs(spec: SweepSpec, ended: Sequence[int]) -> float:
    budget = spec.budget.epochs
    pausing = make_pausing_rule(spec)
    if isinstance(pausing, SuccessiveHalving):  # the trials that end first are the longest
        bounds = [0, *pausing.rungs, budget]
        shares = (float(pausing.reduction) ** -index for index in range(len(bounds)))
        pairs = zip(bounds, bounds[1:], shares, strict=False)
        return sum(share * (end - start) for start, end, share in pairs)
    if pausing is not None or not ended:
        return float(budget)
    return max(sum(ended) / len(ended), 1.0)


def seconds_left(view: SweepStatus, delivery: DeliveryEstimate) -> float | None:
    """Return how long a sweep that another process runs probably still takes.

    None before its first epochs, and if all of its trials have ended.
    """
    ended = [record.epoch for record in view.records if record.finished]
    unfinished = [record.epoch for record in view.records if not record.finished]
    done, num_unstarted = sum(ended) + sum(unfinished), view.num_left - len(unfinished)
    if not (done and view.ledger.seconds and view.num_left):
        return None
    left = epochs_left(view.spec, ended, unfinished, num_unstarted)
    training = left * view.ledger.seconds / done
    return training + delivery.seconds(training)


class DeliveryEstimate:
    """Estimate how long the delivery of records lasts beyond the training.

    Args:
        backlog: Returns how many records wait, and the id of the first one; ids ascend.
        clock: Returns monotonic seconds.
        every: Seconds between two calls of `backlog`.
    """

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
        self._rate = 0.0

    def seconds(self, training: float) -> float:
        """Return the seconds from the end of training until all records are delivered.

        Args:
            training: For how many seconds the sweep still trains.
        """
        if self._clock() - self._looked >= self._every:
            self._look()
        if not self._waiting or not self._rate:
            return 0.0
        elapsed = self._looked - self._started
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
