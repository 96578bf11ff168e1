"""Signals: the first SIGINT or SIGTERM drains, the second leaves at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Turns signals into a state that a loop can look at.

    Args:
        on_first: Called, in the signal handler, by the first signal.
        on_second: Called by every further one; expected not to return.
    """

    def __init__(self, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        self._on_first = on_first
        self._on_second = on_second
        self._before: dict[int, Any] = {}
        self._signal: int | None = None
        self._since = 0.0

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reinstall(self) -> None:
        """Take the signals back from a library that has set handlers of its own."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells count; 0 without one."""
        return 128 + self._signal if self._signal is not None else 0

    @property
    def seconds(self) -> float:
        """How long ago the first signal came."""
        return time.monotonic() - self._since if self.requested else 0.0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._signal is None:
            self._signal, self._since = number, time.monotonic()
            self._on_first()
        else:
            self._on_second()
