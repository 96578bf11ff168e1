"""The final state of a sweep, read from the ledger, the checkpoint store and the tracking store.

What must not live here: what of it must be true (see `invariants.py`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sweeps.ledger.reader import LedgerReader
from sweeps.spec.revisions import read_spec
from sweeps.stores import trial_store
from tests.chaos.killed_runs import curve
from tests.chaos.probe_task import KINDS
from tests.chaos.sandbox import Sandbox
from tests.chaos.tracking_service import Run, read_store
from trainable.errors import AllCheckpointsDamaged
from trainable.watch.diagnostics import MEASURED


@dataclass
class Outcome:
    """What a sweep has come to.

    Attributes:
        trials: What `sweep trials --json` says.
        status: What `sweep status --json` says.
        states: The newest saved state of each trial, without measured metrics.
        curves: Steps and metrics of each trial's file, without what was measured.
        runs: Each trial's runs; None holds those of the sweep itself.
        passes: How many passes of each kind were executed, whatever became of them.
        seconds: How long the driver ran that brought it to its end.
    """

    trials: list[dict[str, Any]]
    status: dict[str, Any]
    states: dict[int, dict[str, Any]]
    curves: dict[int, list[tuple[int, dict[str, float]]]]
    runs: dict[int | None, list[Run]]
    passes: dict[str, int]
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
        {trial["number"]: curve(sandbox.paths.trial(trial["number"])) for trial in trials},
        read_runs(sandbox),
        {kind: sandbox.probe.count(kind) for kind in KINDS},
        seconds,
    )


def read_state(sandbox: Sandbox, number: int) -> dict[str, Any]:
    """The newest sound state of a trial, without measured metrics; empty when there is none."""
    store = trial_store(sandbox.paths, read_spec(sandbox.paths.spec).spec, number)
    try:
        newest = store.newest()
    except AllCheckpointsDamaged:
        return {}
    return _without_measured(store.load(newest)) if newest is not None else {}


def read_runs(sandbox: Sandbox) -> dict[int | None, list[Run]]:
    """Every run of the sweep in the tracking store, without what was measured.

    A store of the sandbox's own holds nothing else, so that runs which lost their tags count too.
    """
    if sandbox.store is None:
        runs = read_store(f"sqlite:///{sandbox.cli.root / 'mlflow.db'}")
    else:
        runs = read_store(sandbox.store, LedgerReader(sandbox.paths.ledger).sweep_id)
    found: dict[int | None, list[Run]] = {}
    for run in runs:
        for point in [point for point in run.points if point[0] in MEASURED]:
            del run.points[point]
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


def _without_measured(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_measured(v) for k, v in value.items() if k not in MEASURED}
    if isinstance(value, (list, tuple)):
        return [_without_measured(entry) for entry in value]
    return value
