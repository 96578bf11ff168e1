"""A tracking server on disk that keeps every received point, duplicates included.

Run as a program it is the child of the kill tests: a driver that records three trials and kills
itself at the N-th passage of one place.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tracking.delivery import TAG_TRIAL, FoundRun, RunGone, RunState
from tracking.delivery_loop import DeliveryThread
from tracking.metric_points import Point, Request
from tracking.outbox import SWEEP, Outbox
from tracking.recorder import Recorder
from tracking.tracker import TrackedSweep

TRIALS = 3
STEPS = 120


class Line(NamedTuple):
    """A row as the training side logs it."""

    step: int
    timestamp_ms: int
    metrics: dict[str, float]


def value_of(trial: int, key: str, step: int) -> float:
    """The value that a replay must not change."""
    return trial + step / 7 + len(key)


def lines(trial: int, first: int, last: int) -> list[Line]:
    """The rows of the steps first..last, both included."""
    keys = ("train/loss", "train/lr")
    return [
        Line(s, 1000 + s, {k: value_of(trial, k, s) for k in keys}) for s in range(first, last + 1)
    ]


class DiskServer:
    """A `TrackingServer` on disk; `fault(place)` is called before and after each write."""

    def __init__(self, path: Path, fault: Callable[[str], None] = lambda _: None) -> None:
        self.fault = fault
        self.calls: Counter[str] = Counter()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;"
            "CREATE TABLE IF NOT EXISTS runs (id INTEGER PRIMARY KEY, trial INTEGER, status TEXT,"
            " params TEXT, tags TEXT, deleted INTEGER DEFAULT 0, start_ms INTEGER,"
            " end_ms INTEGER);"
            "CREATE TABLE IF NOT EXISTS points"
            " (run INTEGER, key TEXT, value REAL, step INTEGER, ts INTEGER);"
            "CREATE TABLE IF NOT EXISTS files (run INTEGER, path TEXT, content BLOB);"
            "CREATE TABLE IF NOT EXISTS experiment_tags (name TEXT PRIMARY KEY, value TEXT);"
        )

    def close(self) -> None:
        self._db.close()

    def open_experiment(self, known: str | None) -> str:
        assert known in (None, "7")
        self.fault("before open_experiment")
        return "7"

    def find_runs(self, experiment_id: str) -> list[FoundRun]:
        assert experiment_id == "7"
        rows = self._db.execute("SELECT id, trial, start_ms, deleted, params FROM runs").fetchall()
        with_points = {run for (run,) in self._db.execute("SELECT DISTINCT run FROM points")}
        return [
            FoundRun(
                str(run), trial, start_ms, bool(deleted), params == "{}" and run not in with_points
            )
            for run, trial, start_ms, deleted, params in rows
            if trial is not None
        ]

    def create_run(self, experiment_id: str, start_ms: int, tags: Mapping[str, str]) -> str:
        assert experiment_id == "7"
        self.fault("before create_run")
        trial = int(tags.get(TAG_TRIAL, SWEEP))
        done = self._db.execute(
            "INSERT INTO runs (trial, status, params, tags, start_ms)"
            " VALUES (?, 'RUNNING', '{}', ?, ?)",
            (trial, json.dumps(dict(tags)), start_ms),
        )
        self.fault("after create_run")
        return str(done.lastrowid)

    def restore_run(self, run_id: str) -> None:
        self._db.execute("UPDATE runs SET deleted = 0 WHERE id = ?", (run_id,))

    def delete_run(self, run_id: str) -> None:
        self._db.execute("UPDATE runs SET deleted = 1 WHERE id = ?", (run_id,))

    def read_run(self, run_id: str) -> RunState:
        self.calls["read_run"] += 1
        status, params, tags = self._one(run_id, "status, params, tags")
        keys = self._db.execute("SELECT DISTINCT key FROM points WHERE run = ?", (run_id,))
        held = frozenset(key for (key,) in keys)
        where = f"s3://ada:hunter2@bucket/{run_id}"
        return RunState(status, json.loads(params), held, json.loads(tags), where)

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        self.calls["history"] += 1
        return self._db.execute(
            "SELECT step, value FROM points WHERE run = ? AND key = ?", (run_id, key)
        ).fetchall()

    def log(self, run_id: str, request: Request) -> None:
        """Three transactions, as MLflow's stores make of it."""
        self.calls["log"] += 1
        if request.params:
            self.log_params(run_id, request.params)
        if request.points:
            self.log_points(run_id, request.points)
        if request.tags:
            self.set_tags(run_id, request.tags)

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        self.fault("before log_points")
        assert len(points) <= 1000
        self._one(run_id, "id")
        self._db.execute("BEGIN")
        self._db.executemany(
            "INSERT INTO points VALUES (?, ?, ?, ?, ?)", [(run_id, *point) for point in points]
        )
        self._db.execute("COMMIT")
        self.fault("after log_points")

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        self.fault("before log_params")
        held = json.loads(self._one(run_id, "params")[0])
        assert not held.keys() & params.keys(), "parameters are written once"
        self._db.execute(
            "UPDATE runs SET params = ? WHERE id = ?", (json.dumps({**held, **params}), run_id)
        )
        self.fault("after log_params")

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self.fault("before set_tags")
        merged = {**json.loads(self._one(run_id, "tags")[0]), **tags}
        self._db.execute("UPDATE runs SET tags = ? WHERE id = ?", (json.dumps(merged), run_id))
        if tags.get(TAG_TRIAL) == "":  # it is no trial's run any more
            self._db.execute("UPDATE runs SET trial = NULL WHERE id = ?", (run_id,))

    def set_experiment_tags(self, experiment_id: str, tags: Mapping[str, str]) -> None:
        assert experiment_id == "7"
        self.fault("before set_experiment_tags")
        self._db.executemany("INSERT OR REPLACE INTO experiment_tags VALUES (?, ?)", tags.items())

    def set_status(self, run_id: str, status: str, end_ms: int | None) -> None:
        self.fault("before set_status")
        self._db.execute(
            "UPDATE runs SET status = ?, end_ms = ? WHERE id = ?", (status, end_ms, run_id)
        )
        self.fault("after set_status")

    def upload(self, run_id: str, path: Path, folder: str) -> None:
        self.fault("before upload")
        row = (run_id, str(Path(folder) / path.name), path.read_bytes())
        self._db.execute("INSERT INTO files VALUES (?, ?, ?)", row)

    def points(self, trial: int) -> list[tuple[str, int, float]]:
        """Every point as it was sent, of all living runs of a trial."""
        query = (
            "SELECT key, step, value FROM points JOIN runs ON runs.id = points.run "
            "WHERE trial = ? AND NOT deleted ORDER BY key, step"
        )
        return self._db.execute(query, (trial,)).fetchall()

    def runs(self, trial: int) -> list[tuple[str, dict[str, str], dict[str, str]]]:
        """Status, parameters and tags of the living runs of a trial."""
        query = "SELECT status, params, tags FROM runs WHERE trial = ? AND NOT deleted"
        rows = self._db.execute(query, (trial,)).fetchall()
        return [(status, json.loads(params), json.loads(tags)) for status, params, tags in rows]

    def files(self) -> list[tuple[str, bytes]]:
        return self._db.execute("SELECT path, content FROM files").fetchall()

    def wipe(self) -> None:
        self._db.executescript("DELETE FROM runs; DELETE FROM points;")

    def _one(self, run_id: str, columns: str) -> tuple[str, ...]:
        row = self._db.execute(f"SELECT {columns} FROM runs WHERE id = ?", (run_id,)).fetchone()
        if row is None:
            raise RunGone(run_id)
        return row


def expected(trial: int) -> list[tuple[str, int, float]]:
    """What `DiskServer.points` returns for a trial that was recorded exactly once."""
    rows = lines(trial, 1, STEPS)
    return sorted((key, row.step, value) for row in rows for key, value in row.metrics.items())


def main(directory: Path, place: str, passage: int) -> None:
    """Record three trials from the start, as a driver does that resumes without a checkpoint."""
    seen = 0

    def fault(here: str) -> None:
        nonlocal seen
        seen += here == place
        if here == place and seen == passage:
            os.kill(os.getpid(), signal.SIGKILL)

    for verb in ("append_rows", "prepare", "next_batch", "delivered", "set_run_id"):
        _report_passages(verb, fault)
    server = DiskServer(directory / "server.db", fault)
    sweep = TrackedSweep(
        experiment="x", sweep_id="s1", outbox=directory / "outbox", params={"trials": TRIALS}
    )
    recorder = Recorder(
        "unused", None, sweep, deliver=lambda one: DeliveryThread(one, lambda: server)
    )
    for trial in range(TRIALS):
        recorder.start(trial, {"lr": trial}, {"attempt": place})
    for first in range(1, STEPS, 10):
        for trial in range(TRIALS):
            recorder.log(trial, lines(trial, first, first + 9))
        if first == 51:
            recorder.flush(10)  # so that sends happen between appends, too
    for trial in range(TRIALS):
        recorder.finish(trial, "FINISHED", {})
    recorder.finish(None, "FINISHED", {})
    sys.exit(recorder.close(10))


def _report_passages(verb: str, fault: Callable[[str], None]) -> None:
    real = getattr(Outbox, verb)

    def wrapped(self: Outbox, *args: object, **kwargs: object) -> object:
        fault(f"before {verb}")
        result = real(self, *args, **kwargs)
        fault(f"after {verb}")
        return result

    setattr(Outbox, verb, wrapped)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
