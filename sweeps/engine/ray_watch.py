"""Watch the Ray on which a driver depends, and report its loss from a thread.

Ray itself waits without an end, or ends the driver without a reason. What must not live here: when
it is lost (`local_ray`, `cluster`), and how the driver exits (`run.driver`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

PATIENCE_SECONDS = 20.0
"""How long a head or a process may not answer. After 60 s Ray would end this process silently."""
_POLL_SECONDS = 1.0
_COUNTED_SECONDS = 5.0
"""The most seconds that count between two checks: a longer gap means a suspended driver."""


class Loss(NamedTuple):
    """Why no trial can run now, and how many seconds that may last; 0 if it cannot recover."""

    cause: str
    patience: float = 0.0


LossHandler = Callable[[str], NoReturn]
"""Receives the cause of a loss, in any thread; must exit the process."""


@contextmanager
def watched(
    find_loss: Callable[[], Loss | None], lost: LossHandler, disconnect: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """Watch Ray while the context is open, and then disconnect from it."""
    over, once = threading.Event(), threading.Lock()

    def leave(cause: str) -> NoReturn:
        once.acquire()  # a second thread waits here until the process ends
        lost(cause)

    def exit_if_lost() -> None:
        if (loss := find_loss()) is not None:
            leave(loss.cause)

    def watch() -> None:
        last, lasted = time.monotonic(), 0.0
        while not over.wait(_POLL_SECONDS):
            loss = find_loss()
            passed, last = time.monotonic() - last, time.monotonic()
            lasted = lasted + min(passed, _COUNTED_SECONDS) if loss else 0.0
            if loss and lasted > loss.patience and not over.is_set():
                leave(f"{loss.cause}, for {loss.patience:g} s" if loss.patience else loss.cause)

    thread = threading.Thread(target=watch, name="watch of Ray", daemon=True)
    thread.start()
    try:
        yield exit_if_lost
    except Exception:  # a lost Ray can cause any error: report the loss instead
        exit_if_lost()
        raise
    finally:
        disconnect()
        over.set()
        thread.join()
