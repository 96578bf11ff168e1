"""Recorded learning curves as arrays: configurations x seeds x epochs.

    table = read_table("digits-cnn")
    table.loss[configuration, seed, epoch - 1]

What must not live here: recording (`collect.py`), and searching (`pool.py`, `cases.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sweeps.spec.space import Distribution
from sweeps.spec.spec import SweepSpec, parse_spec

Array = NDArray[np.float64]
Params = Mapping[str, Any]

DIRECTORY = Path(__file__).parents[2] / "assets" / "curves"
DESIGN = ("digits-cnn", "digits-noisy", "char-lm")
"""Tables to look at while a search is designed."""
HOLDOUT = ("lookup", "friedman")
"""Tables that only judge: nothing is chosen by their results."""
DESIGN_SEEDS = (0, 1)
"""Seeds of the tables for designing; the last seed of each table is held out."""
KEYS = ("configuration", "seed", "epoch")
"""The columns that tell rows apart, in the order in which rows are sorted."""
CURVES = ("val_loss", "val_accuracy", "train_loss", "grad_norm", "clip_fraction", "seconds")
"""The columns with a value for each epoch."""


@dataclass(frozen=True)
class CurveTable:
    """The trainings of one task.

    Attributes:
        name: That of the task's sweep file.
        spec: The sweep that recorded them.
        params: Of each configuration, by dotted path.
        columns: Each column of `CURVES` with shape (configurations, seeds, epochs); NaN after a
            training diverged.
    """

    name: str
    spec: SweepSpec
    params: Sequence[Params]
    columns: Mapping[str, Array]

    @property
    def loss(self) -> Array:
        """The validation loss."""
        return self.columns["val_loss"]

    @property
    def epochs(self) -> int:
        """Epochs of a full training."""
        return int(self.loss.shape[2])

    @cached_property
    def last_epochs(self) -> NDArray[np.int64]:
        """The last epoch that each training reported, by configuration and seed."""
        return np.asarray(np.isfinite(self.loss).sum(axis=2))

    @cached_property
    def truth(self) -> Array:
        """The value of each configuration: the mean over seeds of the lowest loss of each curve.

        Infinite if a seed diverged. The lowest loss is that of the checkpoint that a sweep keeps.
        """
        lowest = np.min(np.where(np.isnan(self.loss), np.inf, self.loss), axis=2)
        lowest[self.last_epochs < self.epochs] = np.inf
        return np.asarray(lowest.mean(axis=1))

    @cached_property
    def regret(self) -> Array:
        """How far each configuration is above the best one; 1 is the median configuration."""
        best = self.truth.min()
        return np.asarray((self.truth - best) / (np.median(self.truth) - best))

    @cached_property
    def decile(self) -> float:
        """The regret of the worst configuration of the best tenth."""
        return float(np.sort(self.regret)[max(len(self.regret) // 10, 1) - 1])

    @cached_property
    def places(self) -> Array:
        """Each configuration in the unit cube, each parameter on its own scale."""
        return np.array([self.place(params) for params in self.params])

    def place(self, params: Params) -> Array:
        """Return the place in the unit cube of any parameters."""
        space: Mapping[str, Distribution] = self.spec.space
        return np.array([one.position(params[key]) for key, one in space.items()])

    def curve(self, configuration: int, seed: int) -> list[float]:
        """Return the losses of a training, without those after it diverged."""
        return list(self.loss[configuration, seed, : self.last_epochs[configuration, seed]])

    @cached_property
    def prices(self) -> Array:
        """Seconds of each epoch; those that a diverging training did not report cost as before."""
        seconds = np.ma.masked_invalid(self.columns["seconds"])
        usual = np.ma.median(seconds, axis=2, keepdims=True).filled(np.ma.median(seconds))
        return np.asarray(np.where(seconds.mask, usual, seconds.data))


def read_table(name: str, directory: Path = DIRECTORY) -> CurveTable:
    """Read the table of a task."""
    table = pq.read_table(directory / f"{name}.parquet")
    about = json.loads(table.schema.metadata[b"gradsweep"])
    keys = [table[key].to_numpy() for key in KEYS]
    shape = (int(keys[0].max()) + 1, int(keys[1].max()) + 1, int(keys[2].max()))
    assert table.num_rows == np.prod(shape), f"{name}: rows are missing"
    order = np.lexsort(keys[::-1])

    def column(key: str) -> Any:
        return table[key].to_numpy()[order].reshape(shape)

    spec = parse_spec(about["spec"], name, drawn=None)
    values = {key: column(key)[:, 0, 0].tolist() for key in spec.space}
    params = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return CurveTable(name, spec, params, {key: column(key).astype(np.float64) for key in CURVES})


def recorded(directory: Path = DIRECTORY) -> list[str]:
    """Return the names of the tables that there are, those for designing first."""
    return [name for name in (*DESIGN, *HOLDOUT) if (directory / f"{name}.parquet").exists()]
