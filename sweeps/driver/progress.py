"""Whether running trials make progress, and the end of a worker that makes none.

The driver watches, not the worker: code that holds Python's lock lets no thread of its own process
run. Only time in which both could run is counted, so neither a stopped process nor a driver that
was away for an hour counts as a hang. Workers on other hosts are not watched. What must not live
here: what becomes of the trial.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import psutil

from sweeps.formatting import format_duration
from sweeps.paths import SweepPaths
from trainable import heartbeat
from trainable.heartbeat import Stamp

_LOOK_SECONDS = 0.5
_COUNTED_SECONDS = 2.0
"""The most that counts between two looks."""
_DUMP_SECONDS = 1.0
"""How long a worker may take to write its stacks."""
_LEAST, _TIMES, _FIRST = 600.0, 20.0, 6 * 3600.0
_OPENING = 600.0


@dataclass(frozen=True)
class Hang:
    """A trial that makes no progress."""

    number: int
    what: str
    seconds: float
    limit: float

    @property
    def reason(self) -> str:
        """In one line, as a failure's reason."""
        return (
            f"hang: no progress for {format_duration(self.seconds)} in its {self.what}; "
            f"failures.step_timeout allows {format_duration(self.limit)}; the stacks of its "
            "threads are in trial.log; correct what it waits for, or raise failures.step_timeout"
        )


@dataclass
class _Seen:
    stamp: Stamp
    idle: float = 0.0


class ProgressWatch:
    """Notices trials that make no progress.

    Args:
        paths: The sweep, whose workers write their heartbeats to `control/`.
        timeout: Seconds without progress; None: 20 times the slowest so far of what the trial is
            doing, at least 10 minutes, and 6 hours for the first of each; `off`: never.
    """

    def __init__(
        self,
        paths: SweepPaths,
        timeout: float | Literal["off"] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = paths
        self._timeout = timeout
        self._clock = clock
        self._last = clock()
        self._seen: dict[int, _Seen] = {}

    def look(self, numbers: Iterable[int]) -> list[Hang]:
        """Return those of the running trials that make no progress; again at each look until they
        are ended.
        """
        passed = self._clock() - self._last
        if self._timeout == "off" or passed < _LOOK_SECONDS:
            return []
        self._last += passed
        hangs = []
        for number in sorted(numbers):
            stamp = self._stamp(number)
            if stamp is None or not stamp.busy:
                self._seen.pop(number, None)
                continue
            seen = self._seen.get(number)
            if seen is None or seen.stamp != stamp:
                self._seen[number] = _Seen(stamp)
                continue
            if not _is_stopped(stamp):
                seen.idle += min(passed, _COUNTED_SECONDS)
            if seen.idle > (limit := self._limit(stamp)):
                hangs.append(Hang(number, stamp.what, seen.idle, limit))
        return hangs

    def end(self, number: int) -> bool:
        """Have a trial's worker write its stacks, and end it; return whether it was there."""
        self._seen.pop(number, None)
        stamp = self._stamp(number)
        if stamp is None or (process := _process(stamp)) is None:
            return False
        with contextlib.suppress(psutil.Error):
            process.send_signal(heartbeat.DUMP_STACKS)
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(_DUMP_SECONDS)
            process.send_signal(signal.SIGKILL)
        return True

    def forget(self, number: int) -> None:
        """A worker begins a trial: what an earlier one noted of it says nothing."""
        self._seen.pop(number, None)

    def _stamp(self, number: int) -> Stamp | None:
        stamp = heartbeat.read(self._paths.heartbeat(number))
        return stamp if stamp and stamp.host == socket.gethostname()[:64] else None

    def _limit(self, stamp: Stamp) -> float:
        if isinstance(self._timeout, float):
            return self._timeout if stamp.beats else max(self._timeout, _OPENING)
        return max(_LEAST, _TIMES * stamp.slowest) if stamp.slowest else _FIRST


def _process(stamp: Stamp) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(stamp.pid)
        if abs(process.create_time() - stamp.created) < 1.0:
            return process
    return None


def _is_stopped(stamp: Stamp) -> bool:
    process = _process(stamp)
    with contextlib.suppress(psutil.NoSuchProcess):
        return process is not None and process.status() in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        )
    return False
