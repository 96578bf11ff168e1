"""The heartbeat of a run: a small file that says when it last made progress, and in what.

The process that trains calls `beat` whenever it gets further; outside of a worker that does
nothing. Another process on the same host reads the file with `read`. A beat costs the reading of a
clock; the file is written four times a second at most, since most steps take less. What must not
live here: what becomes of a run that makes no progress.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainable.storage.regular_files import LARGEST_NOTE, read_regular

DUMP_STACKS = signal.SIGRTMIN + 7
"""The signal on which a worker writes the stacks of all its threads into its log."""

_FORM = struct.Struct("<QdQ?d16s64s")
_WRITE_SECONDS = 0.25
_FIRST_BEATS = 3  # always written: what follows a start, and its first step, differs


class Stamp(NamedTuple):
    """What the file says."""

    pid: int
    created: float
    """When that process was started, which tells it from a later one of that number."""
    beats: int
    """How often it made progress since this run was opened; 0: it is being opened."""
    busy: bool
    """Whether it is at work; else it waits to be told what to do next."""
    slowest: float
    """The longest time in seconds that it took for what it is doing now; 0: never done before."""
    what: str
    """What it is doing now."""
    host: str


class Heartbeat:
    """Writes the file of one run.

    Args:
        path: The file.
        clock: Seconds that do not count while the machine is suspended.
    """

    def __init__(
        self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._path = path
        import psutil  # comes with Ray; a run without one needs it not

        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # an earlier worker may have it open
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._pid, self._created = os.getpid(), psutil.Process().create_time()
        self._host = socket.gethostname().encode()[:64]
        self._slowest: dict[str, float] = {}
        self._done = {"step"}  # of the rest, the slowest is known once all of it was done
        self._count, self._what, self._busy = 0, "opening", False
        self._last = self._written = clock()

    def beat(self, what: str) -> None:
        """Say that the run got further, and what it does next."""
        now = self._clock()
        if (took := now - self._last) > self._slowest.get(self._what, 0.0):
            self._slowest[self._what] = took
        if changed := what != self._what:
            self._done.add(self._what)
        self._last, self._what = now, what
        self._count += 1
        if changed or self._count <= _FIRST_BEATS or now - self._written >= _WRITE_SECONDS:
            self._write()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """While within, the process is expected to make progress."""
        self._last, self._busy = self._clock(), True
        self._write()
        try:
            yield
        finally:
            self._busy = False
            self._write()

    def close(self) -> None:
        """Close the file, and remove it unless it is another worker's by now."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                os.unlink(self._path)
        with contextlib.suppress(OSError):  # a task may have closed it
            os.close(self._file)

    def _write(self) -> None:
        self._written = self._clock()
        what = self._what.encode()
        slowest = self._slowest.get(self._what, 0.0) if self._what in self._done else 0.0
        content = (self._pid, self._created, self._count, self._busy, slowest, what, self._host)
        with contextlib.suppress(OSError):  # a full disk: nobody's work ends by what is not noted
            os.pwrite(self._file, _FORM.pack(*content), 0)


_current: Heartbeat | None = None
"""That of the one run that this process trains."""


def beat(what: str) -> None:
    """Say that this process' run got further, and what it does next: `step`, `evaluation`, `save`
    or `report`.
    """
    if _current is not None:
        _current.beat(what)


def watch(path: str | os.PathLike[str], log: IO[Any]) -> None:
    """Begin the heartbeat of a run in this process; on `DUMP_STACKS` its threads' stacks are
    written into `log`, also while one of them holds Python's lock.
    """
    global _current
    unwatch()
    with contextlib.suppress(OSError):  # without it nobody ends this run for its silence
        _current = Heartbeat(path)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a log that is no file
        faulthandler.register(DUMP_STACKS, file=log, all_threads=True)


def unwatch() -> None:
    """End the heartbeat of this process' run."""
    global _current
    faulthandler.unregister(DUMP_STACKS)
    if _current is not None:
        _current.close()
        _current = None


def at_work() -> contextlib.AbstractContextManager[None]:
    """While within, this process' run is expected to make progress."""
    return contextlib.nullcontext() if _current is None else _current.at_work()


def read(path: Path) -> Stamp | None:
    """Return what a heartbeat's file says; None where there is none."""
    try:
        content = read_regular(path, LARGEST_NOTE)
    except OSError:
        return None
    if len(content) != _FORM.size:
        return None
    pid, created, count, busy, slowest, what, host = _FORM.unpack(content)
    text = [one.rstrip(b"\0").decode(errors="replace") for one in (what, host)]
    return Stamp(pid, created, count, busy, slowest, *text)
