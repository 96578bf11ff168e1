"""P9: how good a search is, as tables with seeds and confidence intervals.

    python -m tests.bench.quality found --rows FILE [--minutes 10] [--seeds 10] ...
    python -m tests.bench.quality epochs --rows FILE ...

`found` is the best loss of a number of evaluations, through the whole path; `epochs` is how much a
search trains until the configuration of the best trial that it shows is as good as asked for. Each
sweep is one line of FILE; what FILE holds is not measured again, so that a long measurement can be
made in portions. `make bench` measures what is missing in the file that QUALITY_ROWS names.

What must not live here: what is compared (`quality_cases.py`), how a sweep is run
(`quality_sweeps.py`), and statistics (`quality_table.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from sweeps.spec.spec import SweepSpec
from tests.bench.quality_cases import (
    CASES,
    EPOCHS,
    FOUND,
    SAMPLERS,
    SEARCHES,
    STOCKS,
    Size,
    problem_spec,
)
from tests.bench.quality_problems import PROBLEMS
from tests.bench.quality_stock import Stock
from tests.bench.quality_sweeps import Ours, Side, Train, drive, one_ray, whole
from tests.bench.quality_table import KEYS, epochs_table, found_table
from tests.bench.rows_file import Row, add_missing, named_file, read
from tests.bench.table import Result


def found(repeats: int) -> list[Result]:
    """The best loss that each sampler finds; the seeds are the repeats."""
    del repeats
    rows = named_file("QUALITY_ROWS")
    fill("found", FOUND, rows)
    return found_table(FOUND, read(rows))


def epochs(repeats: int) -> list[Result]:
    """Epochs that each search needs; the seeds are the repeats."""
    del repeats
    rows = named_file("QUALITY_ROWS")
    fill("epochs", EPOCHS, rows)
    return epochs_table(EPOCHS, read(rows))


def fill(table: str, size: Size, rows: Path, *, seconds: float = float("inf")) -> None:
    """Measure what is missing in a file of rows, seed by seed, for so many seconds."""
    measure = _measure_found if table == "found" else _measure_epochs
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    keys = [
        (
            *(table, problem, search, at_once, seed),
            size.evaluations if table == "found" else CASES[problem].budget,
        )
        for seed, problem, at_once, search in itertools.product(
            range(size.seeds), size.problems, size.at_once, size.searches
        )
    ]

    def measured(*key: Any) -> Row:
        started = time.perf_counter()
        row = measure(*key[1:])
        row["seconds"] = round(time.perf_counter() - started, 1)
        print(dict(zip(KEYS, key, strict=True)) | row, file=sys.stderr)
        return row

    with one_ray() if table == "found" else contextlib.nullcontext():
        add_missing(rows, KEYS, keys, measured, seconds=seconds)


def _measure_found(problem: str, search: str, at_once: int, seed: int, evaluations: int) -> Row:
    spec = _spec(problem_spec(problem) | SAMPLERS[search], at_once, seed)
    spec = spec.model_copy(update={"trials": evaluations})
    with tempfile.TemporaryDirectory(prefix="quality-") as root:
        trials = whole(spec, Path(root))
    assert all(trial.state == "complete" for trial in trials), "a trial did not get through"
    assert len(trials) == evaluations
    return {"best": min(trial.value for trial in trials if trial.value is not None)}


def _measure_epochs(problem: str, search: str, at_once: int, seed: int, budget: int) -> Row:
    case = CASES[problem]
    spec = _spec(case.spec | SEARCHES.get(search, {}), at_once, seed)
    last = spec.budget.reports
    side: Side
    if search in STOCKS:
        space = {key: one.to_optuna() for key, one in spec.space.items()}
        side = Stock(space, epochs=last, seed=seed, asha=STOCKS[search])
    else:
        side = Ours(spec)
    train: Train = partial(case.train, spec)
    reached: dict[str, int] = {}
    best, spent = float("inf"), 0
    for spent, report in enumerate(drive(side, train, epochs=last, at_once=at_once), 1):
        if report.loss < best:
            best = report.loss
            worth = case.shown(report.params, best)
            for level in case.levels:
                if worth <= level:
                    reached.setdefault(str(level), spent)
        if spent == budget or len(reached) == len(case.levels):
            break
    return {"reached": reached, "spent": spent, "best": best}


def _spec(parts: dict[str, Any], at_once: int, seed: int) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "quality",
            "mode": "min",
            "trials": 10_000,
            "seed": seed,
            "concurrency": at_once,
            "resources": {"cpu": 0.5, "gpu": 0},
            **parts,
        }
    )


def main() -> None:
    """Measure a portion, and print the table of what there is by now."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quality", description=__doc__)
    parser.add_argument("table", choices=("found", "epochs"))
    parser.add_argument("--rows", type=Path, required=True, help="one sweep to a line")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="0: only the table")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="+")
    parser.add_argument("--problems", nargs="+", choices=(*PROBLEMS, *CASES))
    parser.add_argument("--searches", nargs="+", choices={*SAMPLERS, *SEARCHES, *STOCKS})
    options = parser.parse_args()
    usual = FOUND if options.table == "found" else EPOCHS
    size = Size(
        options.seeds or usual.seeds,
        tuple(options.at_once or usual.at_once),
        tuple(options.problems or usual.problems),
        tuple(options.searches or usual.searches),
        options.evaluations,
    )
    if options.minutes:
        fill(options.table, size, options.rows, seconds=60 * options.minutes)
    show = found_table if options.table == "found" else epochs_table
    show(size, read(options.rows))


if __name__ == "__main__":
    main()
