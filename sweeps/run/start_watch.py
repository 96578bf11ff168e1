"""Detect that Ray starts no worker although trials wait for one, and nothing trains meanwhile.

Ray and Tune would wait for a worker forever. What must not live here: a worker that is lost, also
as it starts (`tune_callbacks`), or that hangs (`progress`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ray.tune.experiment import Trial

from sweeps.formatting import format_duration
from sweeps.reconcile.failure_policy import Failure

START_SECONDS = 3600.0
"""How long a local Ray may take. A cluster may wait for nodes as long as it likes."""
_COUNTED_SECONDS = 2.0
"""The most seconds that count between two checks: a longer gap means a suspended driver."""


class NoWorkerStarts(BaseException):
    """Trials wait for a worker, and none comes.

    Not an `Exception`: on an `Exception`, Tune waits for its actors before it returns.
    """


class StartWatch:
    """Counts for how long trials have waited while none trains."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._last, self._waited = clock(), 0.0

    def look(self, trials: Iterable[Trial]) -> tuple[int, Failure] | None:
        """Return the first trial that waits, and why the sweep stops, once the limit is passed."""
        passed, self._last = self._clock() - self._last, self._clock()
        waiting = [one.config["number"] for one in trials if one.status == Trial.PENDING]
        self._waited = self._waited + min(passed, _COUNTED_SECONDS) if waiting else 0.0
        if self._waited <= self._limit:
            return None
        reason = (
            f"lost: Ray has started no worker for {format_duration(self._limit)}, although trials "
            "wait for one"
        )
        return min(waiting), Failure("lost", reason, "")
