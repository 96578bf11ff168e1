"""Measure for how long workers train each trial, all attempts together.

The time includes epochs that a later attempt repeats. It excludes the time in which a trial has no
worker: at a rung, in the queue, and between two drivers. What must not live here: when a trial
started and ended (`ledger`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class _Count(NamedTuple):
    total: float
    since: float | None
    """When the worker that trains it now started; None: no worker trains it."""


class TrialClock:
    """Counts the training time of each trial; another thread may read it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[int, _Count] = {}

    def start(self, number: int, *, before: float = 0.0) -> None:
        """Count from now on."""
        total = self.seconds(number)
        self._counts[number] = _Count(before if total is None else total, self._clock())

    def stop(self, number: int) -> None:
        """Stop counting, if a worker trains the trial."""
        total = self.seconds(number)
        if total is not None:
            self._counts[number] = _Count(total, None)

    def seconds(self, number: int) -> float | None:
        """Return the seconds so far; None if no worker of this driver has trained the trial."""
        count = self._counts.get(number)
        if count is None:
            return None
        return count.total + (0.0 if count.since is None else self._clock() - count.since)
