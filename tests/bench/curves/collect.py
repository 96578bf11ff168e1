"""Write the curves of recorded sweeps into one Parquet file for each task.

A task's sweeps are `TASK-0`, `TASK-1` and so on, one for each seed. Configurations whose training
has ended under every seed are taken. What must not live here: reading the files (`tables.py`).
"""

from __future__ import annotations

import datetime
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from sweeps import Sweep
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.bench.curves.tables import CURVES, KEYS

_EACH_EPOCH = {
    "val/loss": "val_loss",
    "val/accuracy": "val_accuracy",
    "train/clip_fraction": "clip_fraction",
    "val/cpu_seconds": "seconds",
}
_EACH_STEP = {"train/loss": "train_loss", "train/grad_norm": "grad_norm"}
"""Averaged over the steps of an epoch."""
_VERSIONS = ("torch", "numpy", "ray", "optuna")
_ENDED = ("complete", "failed")


def collect(name: str, root: Path, directory: Path) -> Path:
    """Write the table of a task; returns the file.

    Args:
        name: The task's; its sweeps have the number of a seed behind it.
        root: The directory of the sweeps.
        directory: Where the file is written.
    """
    sweeps = [Sweep.open(path.name, root=root) for path in sorted(root.glob(f"{name}-[0-9]"))]
    ended = [_num_ended(sweep.trials()) for sweep in sweeps]
    count = min(ended)
    frames = []
    for seed, sweep in enumerate(sweeps):
        frame = _frame(sweep, count)
        frame.insert(1, "seed", np.int8(seed))
        frames.append(frame)
    frame = pd.concat(frames).sort_values(list(KEYS))
    table = pa.Table.from_pandas(frame, preserve_index=False)
    about = {"spec": sweeps[0].to_yaml(), "versions": _versions(), "recorded": _today()}
    table = table.replace_schema_metadata({"gradsweep": json.dumps(about)})
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}.parquet"
    pq.write_table(table, file, compression="zstd", compression_level=19)
    return file


def _num_ended(trials: pd.DataFrame) -> int:
    """Return how many of the first trials have ended, up to the first that has not."""
    running = ~trials["state"].isin(_ENDED).to_numpy()
    return int(running.argmax()) if running.any() else len(trials)


def _frame(sweep: Sweep, count: int) -> pd.DataFrame:
    """Return a row for each configuration and epoch; NaN after a training has diverged."""
    trials = sweep.trials().iloc[:count]
    spec = _spec(sweep)
    epochs = spec.budget.reports
    curves = sweep.curves(*_EACH_EPOCH, *_EACH_STEP)
    by_trial = dict(iter(curves.groupby("trial")))
    rows = [_curve(by_trial.get(number), epochs) for number in range(count)]
    frame = pd.DataFrame(
        {
            "configuration": np.repeat(np.arange(count, dtype=np.int16), epochs),
            "epoch": np.tile(np.arange(1, epochs + 1, dtype=np.int16), count),
        }
    )
    for key in spec.space:
        frame[key] = np.repeat(trials[key].to_numpy(), epochs)
    for index, key in enumerate(CURVES):
        frame[key] = np.concatenate([row[index] for row in rows]).astype(np.float32)
    return frame


def _curve(found: pd.DataFrame | None, epochs: int) -> np.ndarray[Any, Any]:
    """Return the columns of one training, each as long as a full training."""
    columns = {key: np.full(epochs, np.nan) for key in CURVES}
    if found is not None:
        of = dict(iter(found.groupby("metric", observed=True)))
        ends = of["val/loss"]["step"].to_numpy() if "val/loss" in of else np.empty(0)
        for metric, key in _EACH_EPOCH.items():
            if metric in of:
                values = of[metric]["value"].to_numpy()[: len(ends)]
                columns[key][: len(values)] = values
        for metric, key in _EACH_STEP.items():
            if metric in of and len(ends):
                epoch = np.searchsorted(ends, of[metric]["step"].to_numpy())
                means = of[metric]["value"].groupby(epoch).mean()
                columns[key][: len(ends)] = means.reindex(range(len(ends))).to_numpy()
    return np.array([columns[key] for key in CURVES])


def _spec(sweep: Sweep) -> SweepSpec:
    return parse_spec(sweep.to_yaml(), sweep.name, drawn=None)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _VERSIONS}}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
