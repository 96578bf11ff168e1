"""A real `mlflow server` that can be killed and restarted, and the contents of its database.

What must not live here: faults (`scripted_proxy.py`), and what must be true (`invariants.py`).
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from tests.time_limits import Deadline
from tests.tracking_server import start_tracking_server
from tracking.ui import PortTaken


@dataclass
class Run:
    """One run in the tracking store.

    Attributes:
        run_id: Its id there.
        status: As MLflow spells it; `deleted` when it is in the trash.
        params: All of them.
        tags: All of them.
        points: How often each (key, step, value) is there.
    """

    run_id: str
    status: str
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    points: Counter[tuple[str, int, float]] = field(default_factory=Counter)


def read_store(uri: str, sweep_id: str | None = None) -> list[Run]:
    """Read runs, deleted ones included, straight from a tracking store's tables.

    Args:
        uri: The database.
        sweep_id: Only the runs of this sweep; None: all there are.
    """
    engine = create_engine(uri, poolclass=NullPool)
    with engine.connect() as db:
        runs = {
            run_id: Run(run_id, status if stage == "active" else stage)
            for run_id, status, stage in db.execute(
                text("SELECT run_uuid, status, lifecycle_stage FROM runs")
            )
        }
        for run_id, key, value in db.execute(text("SELECT run_uuid, key, value FROM params")):
            runs[run_id].params[key] = value
        for run_id, key, value in db.execute(text("SELECT run_uuid, key, value FROM tags")):
            runs[run_id].tags[key] = value
        rows = db.execute(text("SELECT run_uuid, key, step, value, is_nan FROM metrics"))
        for run_id, key, step, value, is_nan in rows:
            runs[run_id].points[key, step, float("nan") if is_nan else value] += 1
    engine.dispose()
    return [run for run in runs.values() if sweep_id in (None, run.tags.get("gradsweep.sweep_id"))]


class Service:
    """A running server; a context manager that ends it.

    Args:
        store: Its database.
        directory: For its artifacts.

    Attributes:
        url: Its address, the same after each start.
    """

    def __init__(self, store: str, directory: Path) -> None:
        self.store = store
        self._artifacts = directory / "artifacts"
        self._server = start_tracking_server(store, self._artifacts)
        self.url = self._server.url

    def files(self, run_id: str) -> list[Path]:
        """The files of a run."""
        return sorted(p for p in self._artifacts.glob(f"*/{run_id}/**/*") if p.is_file())

    def kill(self) -> None:
        """SIGKILL the server and its workers."""
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def start(self) -> None:
        """Start it again, and wait until it answers.

        Raises:
            PortTaken: A killed worker, or somebody else, holds the port for ten seconds.
        """
        self._server.stop()  # what is left of the one before
        port = urlsplit(self.url).port
        assert port is not None
        deadline = Deadline(10)
        while True:
            try:
                self._server = start_tracking_server(self.store, self._artifacts, port=port)
                return
            except PortTaken:  # a killed worker with much memory takes a moment to be gone
                if deadline.passed:
                    raise
                time.sleep(0.1)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
