"""Heartbeat: a small file that says when a run last made progress, and what it does now.

A beat reads a clock; the file is written at most four times a second. Outside a worker, `beat`
does nothing. What must not live here: what happens to a run that makes no progress.
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

from trainable.store.regular_files import LARGEST_NOTE, read_regular

DUMP_STACKS = signal.SIGRTMIN + 7
"""On this signal, a worker writes the stacks of all its threads into its log."""

_FORM = struct.Struct("<QdQ?d16s64s")
OPENING = "opening"
"""What a run does from its start to its first step."""
_WRITE_SECONDS = 0.25
_FIRST_BEATS = 3  # always written: the driver has other limits for a start and a first step


class Stamp(NamedTuple):
    """The contents of a heartbeat file."""

    pid: int
    created: float
    """When the process started; distinguishes it from a later process with the same number."""
    beats: int
    """The number of beats; it changes with each progress."""
    busy: bool
    """Whether the process is training; if false, it waits for Ray's next call."""
    slowest: float
    """The longest time in seconds that its current activity has taken so far; 0: unknown."""
    what: str
    """The current activity."""
    host: str


class Heartbeat:
    """Writes the heartbeat file of one run.

    The file is made when the process first works: Tune may prepare two processes for a trial and
    drop either, and the dropped one must not remove the file of the other.
    """

    def __init__(
        self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._path = path
        import psutil  # installed with Ray, and needed only in Ray's workers

        self._file: int | None = None
        self._pid, self._created = os.getpid(), psutil.Process().create_time()
        self._host = socket.gethostname().encode()[:64]
        self._slowest: dict[str, float] = {}
        # An activity may have several beats: its longest time is known once it has ended.
        self._done = {"step"}
        self._count, self._what, self._busy = 0, OPENING, False
        self._last = self._written = clock()

    def beat(self, what: str) -> None:
        """Record progress, and what the run does next."""
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
        """Mark the process as busy inside the context: it must make progress."""
        self._last, self._busy = self._clock(), True
        with contextlib.suppress(OSError):  # `open` says so
            self.open()
        self._write()
        try:
            yield
        finally:
            self._busy = False
            self._write()

    def open(self) -> None:
        """Make the file, instead of the one of an earlier worker, unless this is done already."""
        if self._file is not None:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # an earlier worker may have it open
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)

    def close(self) -> None:
        """Close the file, and remove it unless another worker has replaced it."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                os.unlink(self._path)
        with contextlib.suppress(OSError):  # a task may have closed it
            os.close(self._file)

    def _write(self) -> None:
        self._written = self._clock()
        if self._file is None:
            return
        what = self._what.encode()
        slowest = self._slowest.get(self._what, 0.0) if self._what in self._done else 0.0
        content = (self._pid, self._created, self._count, self._busy, slowest, what, self._host)
        with contextlib.suppress(OSError):  # a full disk must not end the training
            os.pwrite(self._file, _FORM.pack(*content), 0)


_current: Heartbeat | None = None
"""The heartbeat of the run that this process trains."""


def beat(what: str) -> None:
    """Record progress of this process' run, and what comes: step, evaluation, save or report."""
    if _current is not None:
        _current.beat(what)


def watch(path: str | os.PathLike[str], log: IO[Any]) -> None:
    """Start the heartbeat of a run in this process.

    On the signal `DUMP_STACKS`, the process writes the stacks of all threads into `log`, even if a
    thread holds the GIL.
    """
    global _current
    unwatch()
    _current = Heartbeat(path)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # the log has no file descriptor
        faulthandler.register(DUMP_STACKS, file=log, all_threads=True)


def unwatch() -> None:
    """End the heartbeat of this process' run."""
    global _current
    faulthandler.unregister(DUMP_STACKS)
    if _current is not None:
        _current.close()
        _current = None


def check() -> None:
    """Check that the driver can see whether this process' run makes progress."""
    if _current is not None:
        _current.open()


def at_work() -> contextlib.AbstractContextManager[None]:
    """Mark this process' run as busy inside the context: it must make progress."""
    return contextlib.nullcontext() if _current is None else _current.at_work()


def read(path: Path) -> Stamp | None:
    """Return the contents of a heartbeat file; None if there is none."""
    try:
        content = read_regular(path, LARGEST_NOTE)
    except OSError:
        return None
    if len(content) != _FORM.size:
        return None
    pid, created, count, busy, slowest, what, host = _FORM.unpack(content)
    text = [one.rstrip(b"\0").decode(errors="replace") for one in (what, host)]
    return Stamp(pid, created, count, busy, slowest, *text)
