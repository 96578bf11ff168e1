"""What a sweep has come to, read back from all three owners of the truth: the ledger, the
checkpoint store, and the tracking store.

What must not live here: what of it must be true (see `harness.py`).
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.chaos.sandbox import Sandbox
from trainable.checkpoint import CheckpointStore

# What a clock measured is different in every run.
_BY_THE_CLOCK = ("train/samples_per_second", "train/seconds", "train/device_seconds")


@dataclass
class Run:
    """One run in the tracking store.

    Attributes:
        run_id: Its id there.
        status: As MLflow spells it.
        tags: All of them.
        points: How often each (key, step, value) is there.
    """

    run_id: str
    status: str
    tags: dict[str, str] = field(default_factory=dict)
    points: Counter[tuple[str, int, float]] = field(default_factory=Counter)


@dataclass
class Outcome:
    """What a sweep has come to.

    Attributes:
        trials: What `sweep trials --json` says.
        status: What `sweep status --json` says.
        states: The newest saved state of each trial, without what a clock measured.
        runs: Each trial's runs; None holds those of the sweep itself.
        num_forward: How many forward passes were executed.
        seconds: How long the driver ran that brought it to its end.
    """

    trials: list[dict[str, Any]]
    status: dict[str, Any]
    states: dict[int, dict[str, Any]]
    runs: dict[int | None, list[Run]]
    num_forward: int
    seconds: float

    def history(self, number: int) -> dict[tuple[str, int], float]:
        """The metrics of a trial's run, by (key, step)."""
        return {
            (key, step): value
            for run in self.runs.get(number, [])
            for key, step, value in run.points
        }


def read_outcome(sandbox: Sandbox, seconds: float = 0.0) -> Outcome:
    """Read everything back, after the sweep has ended."""
    trials = sandbox.cli.json("trials", sandbox.paths.name)
    return Outcome(
        trials,
        sandbox.cli.json("status", sandbox.paths.name),
        {trial["number"]: read_state(sandbox, trial["number"]) for trial in trials},
        read_runs(sandbox),
        sandbox.probe.count(),
        seconds,
    )


def read_state(sandbox: Sandbox, number: int) -> dict[str, Any]:
    """The newest saved state of a trial, without what a clock measured; empty without one."""
    store = CheckpointStore(sandbox.paths.trial(number))
    newest = store.newest()
    return _without_clock(store.load(newest)) if newest is not None else {}


def read_runs(sandbox: Sandbox) -> dict[int | None, list[Run]]:
    """Every run of the tracking store, deleted ones included, straight from its tables."""
    path = sandbox.cli.root / "mlflow.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        runs = {
            run_id: Run(run_id, status if stage == "active" else stage)
            for run_id, status, stage in db.execute(
                "SELECT run_uuid, status, lifecycle_stage FROM runs"
            )
        }
        for run_id, key, value in db.execute("SELECT run_uuid, key, value FROM tags"):
            runs[run_id].tags[key] = value
        rows = db.execute("SELECT run_uuid, key, step, value, is_nan FROM metrics")
        for run_id, key, step, value, is_nan in rows:
            if key not in _BY_THE_CLOCK:
                runs[run_id].points[key, step, float("nan") if is_nan else value] += 1
    found: dict[int | None, list[Run]] = {}
    for run in runs.values():
        number = run.tags.get("gradsweep.trial")
        found.setdefault(None if number is None else int(number), []).append(run)
    return found


def digest(state: Any) -> str:
    """The sha256 of a state: names, types, shapes and bits, in the order of their names."""
    found = hashlib.sha256()
    _feed(found, state)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            found.update(f"{key!r}:".encode())
            _feed(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"[{len(value)}]".encode())
        for entry in value:
            _feed(found, entry)
    elif isinstance(value, Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.contiguous().cpu().numpy().tobytes())
    else:
        found.update(f"{type(value).__name__}={value!r}".encode())


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_clock(v) for k, v in value.items() if k not in _BY_THE_CLOCK}
    if isinstance(value, (list, tuple)):
        return [_without_clock(entry) for entry in value]
    return value
