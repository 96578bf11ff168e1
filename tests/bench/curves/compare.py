"""How many epochs searches need on recorded curves; the judge is the mean over all seeds.

    python -m tests.bench.curves compare --rows FILE [--minutes 10] [--seeds 20] ...

Each replication draws, for each configuration, under which of the seeds for designing it trains,
and starts the search with a seed of its own. A search is done when the configuration of the
best trial that it shows belongs to the best tenth, and to the best per cent of regret. What is in
FILE is not measured again. What must not live here: counting (`quality_sweeps.drive`), and how a
search meets a table (`pool.py`).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from sweeps.config.spec import SweepSpec
from tests.bench.curves.pool import (
    AskTell,
    Mapped,
    OneEpochThenTop,
    Pool,
    PooledOurs,
    RandomSearch,
)
from tests.bench.curves.tables import DESIGN_SEEDS, CurveTable, read_table, recorded
from tests.bench.quality_cases import ASHA
from tests.bench.quality_stock import Stock
from tests.bench.quality_sweeps import Side, drive
from tests.bench.quality_table import median_interval, ratio_interval, ruled
from tests.bench.rows_file import Row, add_missing, named_file, read
from tests.bench.table import Result, size

REPLICATIONS = 20
WORKERS = (1, 4, 16)
NEAR = 0.01
"""Regret that counts as having found the best."""
BUDGETS = (3, 10)
"""Full trainings after whose epochs the regret is compared."""
_WORST = 1e9
"""Regret of a configuration that diverges."""
_PROMOTE = {**ASHA, "scheduler": "asha_promote"}
_Make = Callable[[CurveTable, Pool, int, int], Side]


@dataclass(frozen=True)
class OurSearch:
    """A search of a sweep file.

    Attributes:
        parts: What the sweep file says of it.
    """

    parts: dict[str, Any]

    def __call__(self, table: CurveTable, pool: Pool, workers: int, seed: int) -> Side:
        """Return the search over the pool of a table."""
        return PooledOurs(_spec(table, workers, seed, self.parts), pool)


def _ours(**parts: Any) -> OurSearch:
    return OurSearch(parts)


def _spec(table: CurveTable, workers: int, seed: int, parts: dict[str, Any]) -> SweepSpec:
    recorded = table.spec
    return SweepSpec.model_validate(
        {
            "name": "curves",
            "task": {"name": recorded.task.name},
            "metric": "val/loss",
            "mode": "min",
            "trials": len(table.params),
            "seed": seed,
            "concurrency": workers,
            "budget": {"epochs": table.epochs},
            "resources": {"cpu": 1, "gpu": 0},
            "space": {key: one.to_data() for key, one in recorded.space.items()},
            **parts,
        }
    )


def _random(table: CurveTable, pool: Pool, workers: int, seed: int) -> Side:
    del pool, workers
    return AskTell(
        RandomSearch(len(table.params), table.epochs, np.random.default_rng(seed)), table
    )


def _one_epoch(table: CurveTable, pool: Pool, workers: int, seed: int) -> Side:
    del pool, workers
    return AskTell(
        OneEpochThenTop(len(table.params), table.epochs, np.random.default_rng(seed)), table
    )


def _stock(table: CurveTable, pool: Pool, workers: int, seed: int) -> Side:
    del workers
    space = {key: one.to_optuna() for key, one in table.spec.space.items()}
    asha = (ASHA["grace_epochs"], ASHA["reduction"])
    return Mapped(Stock(space, epochs=table.epochs, seed=seed, asha=asha), pool)


RANDOM, OURS = "random", "ours: tpe + asha_promote"
SEARCHES: dict[str, _Make] = {
    RANDOM: _random,
    "one epoch, then the top": _one_epoch,
    "random + asha_promote": _ours(search={"sampler": "random"}, early_stopping=_PROMOTE),
    OURS: _ours(search={"sampler": "tpe"}, early_stopping=_PROMOTE),
    "ours: gp + asha_promote": _ours(search={"sampler": "gp"}, early_stopping=_PROMOTE),
    "stock: optuna + asha": _stock,
}
KEYS = ("problem", "search", "workers", "seed", "configurations")
"""What a row is known by."""


def measure(table: CurveTable, search: str, workers: int, seed: int) -> Row:
    """Run one search over a table; returns when it reached what, and the path of its regret."""
    pool = Pool(table, DESIGN_SEEDS, np.random.default_rng((39, seed)))
    side = SEARCHES[search](table, pool, workers, seed)
    targets = {"decile": table.decile, "best": min(NEAR, table.decile)}
    reached: dict[str, tuple[int, float]] = {}
    path: list[tuple[int, float, float]] = []
    lowest, spent, clock = float("inf"), 0, 0.0
    reports = drive(side, pool.train, epochs=table.epochs, at_once=workers, seconds=pool.seconds)
    for spent, report in enumerate(reports, 1):
        clock = report.clock
        if report.loss < lowest:
            lowest = report.loss
            regret = min(float(table.regret[pool.index(report.params)]), _WORST)
            path.append((spent, clock, regret))
            for name, level in targets.items():
                if regret <= level:
                    reached.setdefault(name, (spent, clock))
        if len(reached) == len(targets) and spent >= BUDGETS[-1] * table.epochs:
            break
    return {"reached": reached, "path": path, "spent": spent, "clock": clock}


def fill(
    rows: Path,
    tables: list[str],
    searches: tuple[str, ...],
    workers: tuple[int, ...],
    seeds: int,
    *,
    seconds: float = float("inf"),
) -> None:
    """Measure what is missing in a file of rows, seed by seed, for so many seconds."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    read_tables = {name: read_table(name) for name in tables}
    keys = [
        (name, search, num, seed, len(read_tables[name].params))
        for seed, num, name, search in itertools.product(range(seeds), workers, tables, searches)
    ]

    def measured(name: str, search: str, num: int, seed: int, _size: int) -> Row:
        return measure(read_tables[name], search, num, seed)

    add_missing(rows, KEYS, keys, measured, seconds=seconds)


def show_all(rows: list[Row]) -> None:
    """Print all tables of a comparison."""
    for target in ("decile", "best"):
        show(rows, target)
    show_regret(rows)


def show(rows: list[Row], target: str) -> None:
    """Print a line for each table, number of workers and search."""
    lines = [("table", "workers", "search", "reached", "epochs (95 %)", "seconds", "random / it")]
    kinds = dict.fromkeys((row["problem"], row["workers"], row["search"]) for row in rows)
    for name, workers, search in sorted(kinds, key=lambda kind: kind[:2]):
        chosen = _of(rows, name, workers, search)
        epochs = [_cost(row, target)[0] for row in chosen]
        low, high = median_interval(epochs)
        ratio = ""
        if search != RANDOM and (base := _of(rows, name, workers, RANDOM)):
            theirs = [_cost(row, target)[0] for row in base]
            ends = ratio_interval(theirs, epochs)
            middle = np.median(theirs) / np.median(epochs)
            ratio = f"{middle:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"
        lines.append(
            (
                name,
                str(workers),
                search,
                f"{sum(target in row['reached'] for row in chosen)} of {len(chosen)}",
                f"{np.median(epochs):.0f} ({low:.0f} to {high:.0f})",
                f"{np.median([_cost(row, target)[1] for row in chosen]):.2g}",
                ratio,
            )
        )
    print(f"until the configuration that is shown is good enough: {target}\n")
    print(ruled(lines), end="\n\n")


def show_regret(rows: list[Row]) -> None:
    """Print the median regret of each search after the epochs of so many full trainings."""
    heads = [f"regret after {budget} trainings" for budget in BUDGETS]
    lines = [("table", "workers", "search", *heads)]
    kinds = dict.fromkeys((row["problem"], row["workers"], row["search"]) for row in rows)
    for name, workers, search in sorted(kinds, key=lambda kind: kind[:2]):
        epochs = read_table(name).epochs
        chosen = _of(rows, name, workers, search)
        cells = []
        for budget in BUDGETS:
            left = [_regret_at(row, budget * epochs) for row in chosen]
            low, high = median_interval(left)
            cells.append(f"{np.median(left):.3f} ({low:.3f} to {high:.3f})")
        lines.append((name, str(workers), search, *cells))
    print("0 is the best configuration of the table, 1 the median one\n")
    print(ruled(lines), end="\n\n")


def _regret_at(row: Row, epochs: int) -> float:
    """Return the regret of what a search shows after so many epochs."""
    left: float = _WORST
    for spent, _, regret in row["path"]:
        if spent > epochs:
            break
        left = regret
    return left


def _of(rows: list[Row], name: str, workers: int, search: str) -> list[Row]:
    kind = (name, workers, search)
    return [row for row in rows if (row["problem"], row["workers"], row["search"]) == kind]


def _cost(row: Row, target: str) -> tuple[float, float]:
    """Return epochs and seconds; those of the whole table if the target was never reached.

    A search that ends early with the wrong configuration has not been cheap.
    """
    if target in row["reached"]:
        epochs, clock = row["reached"][target]
        return epochs, clock
    epochs, seconds = _whole(row["problem"])
    return epochs, seconds / row["workers"]


@functools.cache
def _whole(name: str) -> tuple[int, float]:
    """Return epochs and seconds of all configurations of a table under one seed."""
    table = read_table(name)
    return len(table.params) * table.epochs, float(table.prices.sum() / table.loss.shape[1])


def curves(repeats: int) -> list[Result]:
    """Compare the searches on all tables; the replications are the repeats."""
    del repeats
    rows = named_file("CURVES_ROWS")
    workers = (4,) if size(2, 1) == 1 else WORKERS
    fill(rows, recorded(), tuple(SEARCHES), workers, size(REPLICATIONS, 2))
    print(f"{len(recorded())} tables, {size(REPLICATIONS, 2)} replications", file=sys.stderr)
    found = read(rows)
    show_all(found)
    return [_result(found, name) for name in recorded()]


def _result(rows: list[Row], name: str) -> Result:
    """Return ours against random search to the best tenth, with four workers."""
    ours, theirs = (
        [_cost(row, "decile")[0] for row in _of(rows, name, 4, search)]
        for search in (OURS, RANDOM)
    )
    middle = float(np.median(ours) / np.median(theirs))
    low, high = ratio_interval(ours, theirs)
    return Result(
        f"curves {name}, epochs to the best tenth (95 %) / random",
        float(np.median(ours)),
        float(np.median(theirs)),
        "epochs",
        (low, middle, high),
    )
