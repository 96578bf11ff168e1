"""Signals: the first SIGINT or SIGTERM drains, the second leaves at once, and so does the end of
the grace period. The end of the terminal, SIGHUP, drains, too.

They are heard in a thread: the main one may stand in a library that neither answers signals nor
can be interrupted, and some libraries put handlers of their own in the place of ours. What must
not live here: what draining and leaving mean.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY = 0.25
"""Seconds between two looks at what is asked in other ways than by signals."""
_CLOSE = b"\0"
"""No signal has the number 0."""


class ExitRequested(BaseException):
    """A signal came while there was nothing to drain."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Raise `ExitRequested` at the first signal, while nothing runs that needs draining."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        raise ExitRequested(number)

    before = _handle(leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interruption:
    """Turns signals into a state that a loop can look at.

    Args:
        on_first: Called, in a thread, by the first signal or `drain`.
        on_last: Called, in a thread, by a further signal or when the grace period has long been
            over; expected not to return.
        grace: Seconds from the first signal until everything is to be over.
        look: Called a few times a second; may call `drain`.
    """

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
        self._before = _handle(_heard)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._writer, _CLOSE)
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def drain(self, number: int = signal.SIGINT) -> None:
        """Do as the first signal would; the next signal is nevertheless the first one."""
        if self._signal is None:
            self._since, self._signal = time.monotonic(), number
            self._on_first()

    def leave(self) -> None:
        """Do as the second signal would."""
        self._on_last()

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells count; 0 without one."""
        return 128 + self._signal if self._signal is not None else 0

    @property
    def grace(self) -> float:
        """Seconds from the first signal until everything is to be over."""
        return self._grace

    @property
    def left(self) -> float:
        """Seconds until everything is to be over; infinite before the first signal."""
        return self._since + self._grace - time.monotonic() if self.requested else float("inf")

    @property
    def trial_grace_remaining(self) -> float:
        """Seconds that trials have: a fifth of the grace period, at most 5 s, is left for what
        comes after them.
        """
        return self.left - min(5.0, self._grace / 5)

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], _LOOK_EVERY)
            for number in os.read(self._reader, 64) if ready else b"":
                if number in _CLOSE:
                    return
                if number in _SIGNALS:  # every other one with a handler comes this way too
                    # Of a terminal's end both the system and the shell may tell.
                    self._num_signals += number != signal.SIGHUP
                    self.drain(number)
            self._look()
            # leaving takes a moment too
            if self._num_signals > 1 or self.left <= min(0.5, self._grace / 10):
                self._on_last()


def _heard(number: int, frame: FrameType | None) -> None:
    """Nothing: that there is a handler lets the thread hear."""
    del number, frame


def _handle(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Set a handler; returns those before it. What `nohup` ignores stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heard = [number for number in _SIGNALS if number != signal.SIGHUP or not ignored]
    return {number: signal.signal(number, handler) for number in heard}
