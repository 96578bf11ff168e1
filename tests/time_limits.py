"""Time limits of tests, in one place: they grow with the load of the machine.

A test names the seconds that suffice where nothing else runs. A loaded machine gets up to
`_MOST` times as many. `TEST_TIME_FACTOR=3` sets the factor by hand. What must not live here:
durations that a product reads (`step_timeout`, grace periods), which do not scale.
"""

from __future__ import annotations

import os
import time

_MOST = 8.0


def time_factor() -> float:
    """Return how many times longer a limit is now: runnable processes per CPU, from 1 to 8."""
    if given := os.environ.get("TEST_TIME_FACTOR"):
        return float(given)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(max(1.0, os.getloadavg()[0] / (cpus or 1)), _MOST)


def scaled(seconds: float) -> float:
    """Return a time limit for this machine as it is loaded now."""
    return seconds * time_factor()


class Deadline:
    """A time limit that grows when the machine gets busier while a test waits."""

    def __init__(self, seconds: float) -> None:
        """Start to wait.

        Args:
            seconds: What suffices where nothing else runs.
        """
        self._started, self._seconds = time.monotonic(), seconds

    @property
    def passed(self) -> bool:
        """Whether more time has passed than the machine's load explains."""
        return time.monotonic() - self._started > scaled(self._seconds)

    def __str__(self) -> str:
        return f"{scaled(self._seconds):g} s ({self._seconds:g} s times the machine's load)"
