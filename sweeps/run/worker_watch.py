"""Watch over workers: whether Ray starts them, whether they make progress, how long they train.

In the driver, because code in a worker that holds the GIL would block a watching thread, too. Time
counts only while both processes can run, so a stopped worker or a suspended driver is no hang.
Workers on other hosts are not watched. What must not live here: retries (`tune_callbacks`).
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

import psutil
from ray.tune.experiment import Trial

from sweeps.formatting import format_duration
from sweeps.paths import SweepPaths
from sweeps.reconcile.failure_policy import Failure
from sweeps.spec.trial_run import rank_timeout
from trainable import rank_waits
from trainable.watch import heartbeat
from trainable.watch.heartbeat import OPENING, Stamp

_LOOK_SECONDS = 0.5
_COUNTED_SECONDS = 2.0
"""The most seconds that count between two checks: a longer gap means a suspended driver."""
_DUMP_SECONDS = 1.0
"""How long a worker may take to write its stacks."""
_LEAST, _TIMES, _FIRST = 600.0, 20.0, 6 * 3600.0
_OPENING = 600.0
_BETWEEN = "wait for its next step"
"""What a trial does whose process has ended a step: Tune asks for the next one at once."""


@dataclass(frozen=True)
class Hang:
    """A trial that makes no progress: the seconds since the last progress, and what is allowed.

    `limit` is what one process may take, `rank_wait` what it may wait for other ranks besides.
    """

    number: int
    what: str
    seconds: float
    limit: float
    rank_wait: float = 0.0

    @property
    def reason(self) -> str:
        """The reason of the failure, in one line."""
        wait = f" and {format_duration(self.rank_wait)} to wait for its other ranks"
        return (
            f"hang: no progress for {format_duration(self.seconds)} in its {self.what}; "
            f"failures.step_timeout allows {format_duration(self.limit)}"
            f"{wait if self.rank_wait else ''}; the stacks of its "
            "threads are in trial.log; correct the code that blocks, or raise "
            "failures.step_timeout"
        )


@dataclass
class _LastStamp:
    stamp: Stamp
    idle: float = 0.0


class ProgressWatch:
    """Detects trials that make no progress, by the heartbeat of their first rank."""

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
        self._stamps: dict[int, _LastStamp] = {}
        self._with_ranks: set[int] = set()

    def look(self, numbers: Iterable[int]) -> list[Hang]:
        """Return the trials that make no progress; later calls return them again until `end`."""
        passed = self._clock() - self._last
        if self._timeout == "off" or passed < _LOOK_SECONDS:
            return []
        self._last += passed
        hangs = []
        for number in sorted(numbers):
            stamp = self._stamp(number)
            if stamp is None:
                self._stamps.pop(number, None)
                continue
            last = self._stamps.get(number)
            if last is None or last.stamp != stamp:
                self._stamps[number] = _LastStamp(stamp)
                continue
            if not _is_stopped(stamp):
                last.idle += min(passed, _COUNTED_SECONDS)
            limit, wait = self._limit(stamp), self._rank_wait(number, stamp)
            if last.idle > limit + wait:
                what = stamp.what if stamp.busy else _BETWEEN
                hangs.append(Hang(number, what, last.idle, limit, wait))
        return hangs

    def end(self, number: int) -> bool:
        """Make a trial's worker write the stacks of its threads, then kill the worker."""
        self._stamps.pop(number, None)
        stamp = self._stamp(number)
        if stamp is None or (process := _process(stamp)) is None:
            return False
        with contextlib.suppress(psutil.Error):
            process.send_signal(heartbeat.DUMP_STACKS)
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(_DUMP_SECONDS)
            process.send_signal(signal.SIGKILL)
        return True

    def begin(self, number: int, ranks: int) -> None:
        """Forget the heartbeats of a trial's earlier worker when one with so many ranks begins."""
        self._stamps.pop(number, None)
        (self._with_ranks.add if ranks > 1 else self._with_ranks.discard)(number)

    def _stamp(self, number: int) -> Stamp | None:
        stamp = heartbeat.read(self._paths.heartbeat(number))
        return stamp if stamp and stamp.host == socket.gethostname()[:64] else None

    def _limit(self, stamp: Stamp) -> float:
        if not stamp.busy:
            return max(self._timeout, _OPENING) if isinstance(self._timeout, float) else _OPENING
        if isinstance(self._timeout, float):
            return max(self._timeout, _OPENING) if stamp.what == OPENING else self._timeout
        return max(_LEAST, _TIMES * stamp.slowest) if stamp.slowest else _FIRST

    def _rank_wait(self, number: int, stamp: Stamp) -> float:
        if number not in self._with_ranks or not stamp.busy:
            return 0.0
        # As long as ranks wait before they give one up: a lost rank is known before a hang.
        wait = rank_timeout(self._timeout)
        return max(wait, rank_waits.JOIN_SWEEP) if stamp.what == OPENING else wait


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


START_SECONDS = 3600.0
"""How long a local Ray may take. A cluster may wait for nodes as long as it likes."""
"""The most seconds that count between two checks: a longer gap means a suspended driver."""


@dataclass(frozen=True, kw_only=True)
class WorkerRules:
    """How a driver finds out that workers are lost, and how long they may take."""

    node_died: Callable[[Exception | None], bool] = lambda _: False
    """Whether a worker was lost with its whole node."""
    start_seconds: float = math.inf
    """How long trials may wait while no worker starts."""
    grace: float = math.inf
    """How long a trial that the user stops may take to reach its next step."""
    leaving: Set[str] = frozenset()
    """The ids of the nodes that are about to be taken away; it grows as they get notice."""


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
