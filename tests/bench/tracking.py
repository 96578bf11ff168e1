"""P5: points per second, on their way to the tracking store and into it.

Measured are microseconds for one point, so that less is better everywhere. What must not live
here: what tracking costs a training (`tracked.py`).
"""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.table import Goal, Result, Sample, interleave
from tracking.mlflow_server import connect
from tracking.outbox import Outbox
from tracking.recorder import Recorder, process_with
from tracking.tracker import TrackedSweep

RUNS, KEYS, ROWS_A_REPORT = 16, 3, 100
_APPENDED_REPORTS, _DELIVERED_REPORTS = 160, 160
_LOGGED_SINGLY = 200
_PATIENCE = 600.0
_CLOCK = itertools.count(10**12)
"""Rows are stamped one after the other, as a training stamps them. MLflow's table of metrics is
sorted by key and time: were the stamps those of earlier rows, each request would change hundreds
of pages in its middle."""

_SQLITE = "raw executemany"
_BATCH = "log_batch of 1,000, one run"
_IN_TURN = "log_batch of 1,000, runs in turn"
_SINGLE = "log_metric"


class Line(NamedTuple):
    """A row as the training logs it."""

    step: int
    timestamp_ms: int
    metrics: dict[str, float]


def append(repeats: int) -> list[Result]:
    """What `log` costs whoever calls it, against the same points put into SQLite directly."""
    return interleave(
        f"P5 append, {RUNS} runs in turn",
        _append,
        {_SQLITE: _insert},
        unit="us/point",
        goals={_SQLITE: Goal("ratio", 2.0)},  # at least half as many points per second
        repeats=repeats,
    )


def deliver(repeats: int) -> list[Result]:
    """Points that lie in MLflow in the end, in turn for all runs, against other ways there."""
    with tempfile.TemporaryDirectory() as directory:
        store = _Store(Path(directory))
        peers: dict[str, Sample] = {
            _BATCH: store.log_batch,
            _IN_TURN: store.log_batch_in_turn,
            _SINGLE: store.log_metric,
            "Ray's MLflowLoggerCallback": store.ray_callback,
            "Ray's setup_mlflow": store.ray_setup,
        }
        for side in (store.deliver, *peers.values()):
            side()  # imports, and the tables of the first use
        return interleave(
            f"P5 delivered, {RUNS} runs in turn",
            store.deliver,
            peers,
            unit="us/point",
            goals={
                _BATCH: Goal("ratio", 1 / 0.9),
                _IN_TURN: Goal("ratio", 1 / 0.9),
                _SINGLE: Goal("ratio", 1 / 30),
            },
            repeats=repeats,
        )


def _reports(count: int) -> Iterator[tuple[int, list[Line]]]:
    """Reports of all runs in turn, each with its run's number."""
    for number in range(count):
        first = number // RUNS * ROWS_A_REPORT + 1
        yield number % RUNS, [_line(s) for s in range(first, first + ROWS_A_REPORT)]


def _line(step: int) -> Line:
    metrics = {"train/loss": 1 / step, "train/grad_norm": step / 7, "train/lr": 1e-3 / step}
    assert len(metrics) == KEYS
    return Line(step, next(_CLOCK), metrics)


def _log_line(row: Line) -> str:
    """A line of a trial's log, as the trial writes it."""
    return json.dumps({"step": row.step, "time": row.timestamp_ms, "metrics": row.metrics}) + "\n"


def _append() -> float:
    reports = list(_reports(_APPENDED_REPORTS))
    with tempfile.TemporaryDirectory() as directory:
        outbox = Outbox(Path(directory))
        started = time.perf_counter()
        for run, rows in reports:
            outbox.append_rows(run, rows)
        taken = time.perf_counter() - started
        outbox.close()
    return 1e6 * taken / (_APPENDED_REPORTS * ROWS_A_REPORT * KEYS)


def _insert() -> float:
    points = [
        (run, key, row.step, value, row.timestamp_ms)
        for run, rows in _reports(_APPENDED_REPORTS)
        for row in rows
        for key, value in row.metrics.items()
    ]
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(sqlite3.connect(Path(directory, "raw.db"), isolation_level=None)) as db,
    ):
        db.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;"
            "CREATE TABLE points (run INT, key TEXT, step INT, value REAL, time INT);"
        )
        started = time.perf_counter()
        db.execute("BEGIN")
        db.executemany("INSERT INTO points VALUES (?, ?, ?, ?, ?)", points)
        db.execute("COMMIT")
        return 1e6 * (time.perf_counter() - started) / len(points)


class _Trial:
    """What Ray's callback asks of a trial."""

    config: dict[str, Any] = {}  # noqa: RUF012  nobody changes it


class _Store:
    """A tracking store on SQLite, and the ways of getting points into it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._uri = f"sqlite:///{directory}/mlflow.db"
        self._client = connect(self._uri)
        self._experiment = self._client.create_experiment("bench")

    def deliver(self) -> float:
        name = uuid.uuid4().hex
        recorder = Recorder(
            self._uri,
            None,
            TrackedSweep(
                experiment="bench", sweep_id=name, outbox=self._directory / name / "outbox"
            ),
            deliver=process_with(os.environ),
        )
        logs = [self._directory / name / f"trials/{run:04d}/metrics.jsonl" for run in range(RUNS)]
        for run in range(RUNS):
            recorder.start(run, {}, {})
            logs[run].parent.mkdir(parents=True)
        assert recorder.flush(_PATIENCE) == 0
        reports = list(_reports(_DELIVERED_REPORTS))
        started = time.perf_counter()
        for run, rows in reports:
            with logs[run].open("a") as file:
                file.writelines(map(_log_line, rows))
            recorder.follow(run, rows[-1].step)
        assert recorder.flush(_PATIENCE) == 0
        taken = time.perf_counter() - started
        recorder.close(_PATIENCE)
        return 1e6 * taken / (_DELIVERED_REPORTS * ROWS_A_REPORT * KEYS)

    def log_batch(self) -> float:
        from mlflow.entities import Metric

        run_id = self._client.create_run(self._experiment).info.run_id
        num_points = _DELIVERED_REPORTS * ROWS_A_REPORT * KEYS
        points = [
            Metric(key, value, row.timestamp_ms, row.step)
            for row in map(_line, range(1, num_points // KEYS + 1))
            for key, value in row.metrics.items()
        ]
        return _timed(
            lambda: [
                self._client.log_batch(run_id, metrics=points[first : first + 1000])
                for first in range(0, num_points, 1000)
            ],
            num_points,
        )

    def log_batch_in_turn(self) -> float:
        """What MLflow itself takes for the same points of the same runs in the same order."""
        from mlflow.entities import Metric

        points: dict[str, list[Metric]] = {
            self._client.create_run(self._experiment).info.run_id: [] for _ in range(RUNS)
        }
        runs = list(points)
        for run, rows in _reports(_DELIVERED_REPORTS):
            points[runs[run]] += [
                Metric(key, value, row.timestamp_ms, row.step)
                for row in rows
                for key, value in row.metrics.items()
            ]
        num_points = _DELIVERED_REPORTS * ROWS_A_REPORT * KEYS
        return _timed(
            lambda: [
                self._client.log_batch(run, metrics=points[run][first : first + 1000])
                for first in range(0, num_points // RUNS, 1000)
                for run in runs
            ],
            num_points,
        )

    def log_metric(self) -> float:
        run_id = self._client.create_run(self._experiment).info.run_id
        return _timed(
            lambda: [
                self._client.log_metric(run_id, "train/loss", 1 / step, step=step)
                for step in range(1, _LOGGED_SINGLY + 1)
            ],
            _LOGGED_SINGLY,
        )

    def ray_callback(self) -> float:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        callback = MLflowLoggerCallback(tracking_uri=self._uri, experiment_name="bench")
        callback.setup()
        trial: Any = _Trial()
        callback.log_trial_start(trial)
        taken = _timed(
            lambda: [
                callback.log_trial_result(
                    step, trial, {"training_iteration": step, **_line(step).metrics}
                )
                for step in range(1, _LOGGED_SINGLY // KEYS + 1)
            ],
            _LOGGED_SINGLY // KEYS * KEYS,
        )
        callback.log_trial_end(trial)
        return taken

    def ray_setup(self) -> float:
        from ray.air.integrations.mlflow import setup_mlflow

        mlflow = setup_mlflow(
            {}, tracking_uri=self._uri, experiment_name="bench", rank_zero_only=False
        )
        taken = _timed(
            lambda: [
                mlflow.log_metrics(_line(step).metrics, step=step)
                for step in range(1, _LOGGED_SINGLY // KEYS + 1)
            ],
            _LOGGED_SINGLY // KEYS * KEYS,
        )
        mlflow.end_run()
        return taken


def _timed(do: Callable[[], object], num_points: int) -> float:
    started = time.perf_counter()
    do()
    return 1e6 * (time.perf_counter() - started) / num_points
