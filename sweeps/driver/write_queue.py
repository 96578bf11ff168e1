"""A background writer: the driver's loop does not wait for the disk.

Entries are written one after another, in the order of `put`. Code that reads what was written
calls `flush` first. `flush` writes the queued entries in the caller's thread, because two threads
that alternate take longer than one. What must not live here: what an entry writes, and where
(`event_writer`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_SECONDS = 1.0
"""`put` blocks while the oldest entry has waited longer. An unresponsive disk or database
therefore delays the loop, as it would without a thread."""
_BATCH_SECONDS = 0.1
"""How long the thread waits for further entries to write in the same batch."""
_MOST = 500
"""How many entries may wait in memory."""

_T = TypeVar("_T")


class WriteQueue(Generic[_T]):
    """Writes queued entries in a background thread, or in the thread that calls `flush`.

    After an error no further entry is written, and every call but `close` raises that error again.

    Args:
        write: Called with all queued entries, in order.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self,
        write: Callable[[Sequence[_T]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._clock = write, clock
        self._changed = threading.Condition()  # guards the attributes below
        self._waiting: list[tuple[float, _T]] = []
        """Each queued entry, with the time at which it was put."""
        self._writing: list[tuple[float, _T]] = []
        self._error: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, entry: _T) -> None:
        """Queue an entry; blocks only while the thread is far behind."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._is_far_behind())
            self._raise()
            assert not self._closing, "put after close"
            self._waiting.append((self._clock(), entry))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of an earlier write, if there is one."""
        with self._changed:
            self._raise()

    def flush(self) -> None:
        """Write all queued entries and return, or raise the error of a write."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error or not self._writing)
                self._raise()
                if not self._waiting:
                    return
            self._write_queued()

    def close(self) -> None:
        """Write the queued entries, if no write fails, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
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
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                self._changed.wait_for(lambda: self._closing or not self._waiting, _BATCH_SECONDS)
                self._changed.wait_for(lambda: not self._writing)
            self._write_queued()

    def _write_queued(self) -> None:
        """Write the queued entries, unless another thread is writing."""
        with self._changed:
            if self._writing or not self._waiting:
                return
            self._writing, self._waiting = self._waiting, []
        error: BaseException | None = None
        try:
            self._write([entry for _, entry in self._writing])
        except BaseException as raised:  # including a lost lock; the next call raises it again
            error = raised
        with self._changed:
            self._writing = []
            if error is not None:
                self._error, self._waiting = error, []
            self._changed.notify_all()
