"""A thread that writes down what the driver's loop decides, so that nobody waits for the disk.

What is put is written in the order in which it was put, one thing after another. Whoever wants to
read what was written settles first, and then writes what waits itself: two threads that run at
once take longer than one. What must not live here: what is written, and where
(`bookkeeping`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_SECONDS = 1.0
"""For how long a thing waits before whoever puts another one waits with it: a place that does not
answer holds up the loop, as it would without a thread."""
_TOGETHER_SECONDS = 0.1
"""For how long more is waited for that can be written with it."""
_MOST = 500
"""How many things may wait, in memory."""

_T = TypeVar("_T")


class WriteQueue(Generic[_T]):
    """Writes what it is given, unless somebody settles in a thread of its own, until something
    cannot be written.

    After an error nothing is written, and each call but `close` raises that error.

    Args:
        write: Called with all that waits, in order.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        write: Callable[[Sequence[_T]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._clock = write, clock
        self._news = threading.Condition()  # guards what follows
        self._waiting: list[tuple[float, _T]] = []
        """What is to be written, and since when."""
        self._writing: list[tuple[float, _T]] = []
        self._error: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, what: _T) -> None:
        """Have something written; waits only while the thread is far behind."""
        with self._news:
            self._news.wait_for(lambda: self._error or not self._is_far_behind())
            self._raise()
            assert not self._closing, "nothing is written any more"
            self._waiting.append((self._clock(), what))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
                self._thread.start()
            self._news.notify_all()

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        with self._news:
            self._raise()

    def flush(self) -> None:
        """Return once all is written, or raise what went wrong."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._error or not self._writing)
                self._raise()
                if not self._waiting:
                    return
            self._write_what_waits()

    def close(self) -> None:
        """Write what waits, as far as that goes, and end the thread."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _is_far_behind(self) -> bool:
        behind = self._writing or self._waiting
        late = bool(behind) and self._clock() - behind[0][0] > _SECONDS
        return late or len(self._writing) + len(self._waiting) >= _MOST

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                self._news.wait_for(lambda: self._closing or not self._waiting, _TOGETHER_SECONDS)
                self._news.wait_for(lambda: not self._writing)
            self._write_what_waits()

    def _write_what_waits(self) -> None:
        """Write it, unless somebody does."""
        with self._news:
            if self._writing or not self._waiting:
                return
            self._writing, self._waiting = self._waiting, []
        error: BaseException | None = None
        try:
            self._write([what for _, what in self._writing])
        except BaseException as problem:  # also a lost lock; raised where the next thing is put
            error = problem
        with self._news:
            self._writing = []
            if error is not None:
                self._error, self._waiting = error, []
            self._news.notify_all()
