"""Handle signals: the first SIGINT, SIGTERM or SIGHUP drains; the second exits immediately.

So does the end of the grace period; SIGHUP counts only as a first signal. A thread receives them:
the main thread may be in a library that cannot be interrupted or replaces Python's handlers. What
must not live here: what draining and exiting do (`run.driver`).
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from sweeps.errors import ExitRequested

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.25
"""Seconds between two calls of `look`, which reads stop requests."""
_CLOSE = b"\0"
"""Ends the thread; no signal has the number 0."""


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Raise `ExitRequested` at the first signal, for code that has nothing to drain."""

    def request_exit(number: int, frame: FrameType | None) -> None:
        del frame
        raise ExitRequested(number)

    before = _set_handlers(request_exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interruption:
    """Turns signals into a state that a loop can check."""

    def __init__(
        self,
        on_first: Callable[[], None],
        on_last: Callable[[], None],
        *,
        grace: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_first = on_first
        self._on_last = on_last
        self._grace = grace
        self._look = look
        self._signal: int | None = None
        self._num_signals = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = _set_handlers(_ignore)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._writer, _CLOSE)
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def drain(self, number: int = signal.SIGINT) -> None:
        """Act as on the first signal; a signal that follows still counts as the first."""
        if self._signal is None:
            self._since, self._signal = time.monotonic(), number
            self._on_first()

    def leave(self) -> None:
        """Act as on the second signal."""
        self._on_last()

    @property
    def requested(self) -> bool:
        """Whether the driver must drain."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as in shells; 0 without a signal."""
        return 128 + self._signal if self._signal is not None else 0

    @property
    def grace(self) -> float:
        """Seconds from the first signal until the process must have ended."""
        return self._grace

    @property
    def left(self) -> float:
        """Seconds until the process must have ended; infinite before the first signal."""
        return self._since + self._grace - time.monotonic() if self.requested else float("inf")

    @property
    def trial_grace_remaining(self) -> float:
        """Seconds that trials still have to save."""
        # The driver keeps a fifth of the grace period, at most 5 s, for its own shutdown.
        return self.left - min(5.0, self._grace / 5)

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], _POLL_SECONDS)
            for number in os.read(self._reader, 64) if ready else b"":
                if number in _CLOSE:
                    return
                if number in _SIGNALS:  # the pipe receives all signals that have a handler
                    # System and shell may both send SIGHUP when a terminal is closed.
                    self._num_signals += number != signal.SIGHUP
                    self.drain(number)
            self._look()
            # A forced exit takes a moment, so it starts before the grace period ends.
            if self._num_signals > 1 or self.left <= min(0.5, self._grace / 10):
                self._on_last()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: only signals with a handler are written to the thread's pipe."""
    del number, frame


def _set_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Set a handler, and return the previous ones; SIGHUP stays ignored under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = [number for number in _SIGNALS if number != signal.SIGHUP or not ignored]
    return {number: signal.signal(number, handler) for number in handled}
