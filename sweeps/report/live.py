"""The server process of `sweep ui NAME`: the report's page, drawn again while the sweep changes.

    python -P -m sweeps.report.live FD DIR ROOT NAME

See `tracking.ui_app` for FD, DIR and the environment. What must not live here: who may read the
page (`tracking.ui_app`), and what is on it (`report`).
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import Executor, Future
from pathlib import Path

from redaction.secrets import redact
from sweeps.errors import LedgerError
from sweeps.paths import SweepPaths
from sweeps.report.report import draw_page
from sweeps.sweep_lock import is_held
from tracking.address import is_server
from tracking.ui_app import ENV_STORE, PageError
from tracking.ui_app import main as serve
from trainable.errors import StorageError

_PAUSE = 4
"""How many times as long as a drawing took the next one waits: a sweep trains beside it."""
_LONGEST_SECONDS = 60.0
"""After these a page is drawn again that nothing in the ledger changed: a driver may be dead, and
tracking or a test on other data may have come further."""


class LivePage:
    """The page of a sweep as it was drawn last; drawn again when the sweep has changed."""

    def __init__(self, paths: SweepPaths, mlflow: str) -> None:
        self._paths, self._mlflow = paths, mlflow
        self._drawing: Future[None] = Future()
        self._seen = self._state()
        self._draw()
        self._drawing.set_result(None)

    def __call__(self, executor: Executor) -> tuple[str, str]:
        """Return the last page at once; draw the next one if there is something new."""
        if self._drawing.done():
            self._drawing.result()
            now, state = time.monotonic(), self._state()
            is_new = state != self._seen or now > self._ended + _LONGEST_SECONDS
            if is_new and now > self._ended + _PAUSE * self._took:
                self._seen, self._drawing = state, executor.submit(self._draw)
        if self._error is not None:
            raise PageError(self._error)
        return self._page

    def _draw(self) -> None:
        begin, self._error = time.monotonic(), None
        try:
            self._page = str(time.time_ns()), draw_page(self._paths, self._mlflow)
        except (ValueError, OSError, LedgerError, StorageError) as problem:
            self._error = redact(str(problem))
        self._ended = time.monotonic()
        self._took = self._ended - begin

    def _state(self) -> tuple[bool, *tuple[tuple[int, int], ...]]:
        """Return what changes with the sweep, read in a moment."""
        stats = [file.stat() for file in (self._paths.ledger, self._paths.spec) if file.exists()]
        times = ((status.st_mtime_ns, status.st_size) for status in stats)
        return is_held(self._paths.lock), *times


if __name__ == "__main__":
    descriptor, artifacts, root, name = sys.argv[1:]
    store = os.environ[ENV_STORE]
    live = LivePage(SweepPaths(Path(root), name), store if is_server(store) else "")
    serve(int(descriptor), Path(artifacts), live)
