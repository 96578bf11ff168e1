"""P9: how good a search is, as tables with seeds and confidence intervals.

    python -m tests.bench.quality found --rows FILE [--minutes 10] [--seeds 10] ...
    python -m tests.bench.quality epochs --rows FILE ...

`found` is the best loss of a number of evaluations, through the whole path; `epochs` is how much a
search trains until the configuration of the best trial that it shows is as good as asked for. Each
sweep is one line of FILE; what FILE holds is not measured again, so that a long measurement can be
made in portions. `make bench` measures what is missing in the file that QUALITY_ROWS names.

What must not live here: problems and sweeps (`quality_problems.py`, `quality_sweeps.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from scipy import stats

from sweeps.spec import SweepSpec
from tests.bench import quality_digits
from tests.bench.quality_problems import METRIC, PROBLEMS, Problem
from tests.bench.quality_stock import Stock
from tests.bench.quality_sweeps import Ours, Params, Train, drive, one_ray, whole
from tests.bench.table import Goal, Result

ASHA = {"scheduler": "asha", "grace_epochs": 1, "reduction": 3}
SAMPLERS: dict[str, dict[str, Any]] = {
    "random": {"search": {"sampler": "random"}},
    "tpe": {"search": {"sampler": "tpe"}},
    "gp": {"search": {"sampler": "gp"}},
}
OURS, STOCK, RANDOM = "asha + tpe", "stock: asha + optuna", "random"
"""What is compared by the goals."""
PEERS = (STOCK, "tpe", RANDOM)
SEARCHES: dict[str, dict[str, Any]] = {
    RANDOM: {"search": {"sampler": "random"}},
    "tpe": {"search": {"sampler": "tpe"}},
    "asha + random": {"search": {"sampler": "random"}, "early_stopping": ASHA},
    OURS: {"search": {"sampler": "tpe"}, "early_stopping": ASHA},
}
STOCKS: dict[str, tuple[int, int] | None] = {
    "stock: optuna": None,
    STOCK: (ASHA["grace_epochs"], ASHA["reduction"]),
}

# Mean and standard deviation of 10 runs of 200 evaluations: benchmarks/README.md of
# scikit-optimize; dummy_minimize by an earlier state of the same page.
PUBLISHED = {
    ("branin", "random"): "skopt dummy 0.911",
    ("branin", "gp"): "skopt gp 0.398",
    ("hartmann6", "random"): "skopt dummy -2.374",
    ("hartmann6", "gp"): "skopt gp -3.299",
}

Row = dict[str, Any]
KEYS = ("table", "problem", "search", "at_once", "seed", "size")


@dataclass(frozen=True)
class Case:
    """A problem whose trainings have epochs.

    Attributes:
        spec: What a spec says of it.
        levels: What counts as good enough, the one of the goals first.
        shown: What the best trial is worth, from its parameters and its best loss so far.
        train: Trains a trial of a sweep.
        budget: Epochs after which a search is given up, and counted with so many.
    """

    spec: dict[str, Any]
    levels: tuple[float, ...]
    shown: Callable[[Params, float], float]
    train: Callable[[SweepSpec, int, Params], Iterator[float]]
    budget: int


def _closed_form(name: str, problem: Problem) -> Case:
    return Case(
        spec={**_task(name), "budget": {"epochs": problem.epochs}},
        levels=problem.regrets,
        shown=lambda params, _loss: problem.final(params) - problem.best,
        train=lambda _spec, _number, params: (
            problem.loss(params, epoch) for epoch in range(1, problem.epochs + 1)
        ),
        budget=200 * problem.epochs,
    )


def _task(name: str) -> dict[str, Any]:
    task = {"name": "tests.bench.quality_problems:run", "problem": name}
    return {"task": task, "metric": METRIC, "space": PROBLEMS[name].space}


CASES = {
    **{name: _closed_form(name, one) for name, one in PROBLEMS.items() if one.speeds},
    "digits": Case(
        spec=quality_digits.SPEC,
        levels=(0.12, 0.15, 0.1),
        shown=lambda _params, loss: loss,
        train=quality_digits.train,
        budget=60 * quality_digits.EPOCHS,
    ),
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    seeds: int
    at_once: tuple[int, ...]
    problems: tuple[str, ...]
    searches: tuple[str, ...]
    evaluations: int = 200


FOUND = Size(10, (1, 4), ("branin", "hartmann6"), tuple(SAMPLERS))
EPOCHS = Size(20, (4,), tuple(CASES), (*SEARCHES, *STOCKS))


def found(repeats: int) -> list[Result]:
    """The best loss that each sampler finds; the seeds are the repeats."""
    del repeats
    rows = _rows_file()
    fill("found", FOUND, rows)
    return found_table(FOUND, read(rows))


def epochs(repeats: int) -> list[Result]:
    """Epochs that each search needs; the seeds are the repeats."""
    del repeats
    rows = _rows_file()
    fill("epochs", EPOCHS, rows)
    return epochs_table(EPOCHS, read(rows))


def _rows_file() -> Path:
    if named := os.environ.get("QUALITY_ROWS"):
        return Path(named)
    return Path(tempfile.mkdtemp(prefix="quality-"), "rows.jsonl")


def fill(table: str, size: Size, rows: Path, *, seconds: float = float("inf")) -> None:
    """Measure what is missing in a file of rows, seed by seed, for so many seconds."""
    deadline = time.monotonic() + seconds
    known = {tuple(row[key] for key in KEYS) for row in read(rows)}
    measure = _measure_found if table == "found" else _measure_epochs
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with (
        one_ray() if table == "found" else tempfile.TemporaryDirectory(),
        rows.open("a", encoding="utf-8") as file,
    ):
        for seed, problem, at_once, search in itertools.product(
            range(size.seeds), size.problems, size.at_once, size.searches
        ):
            amount = size.evaluations if table == "found" else CASES[problem].budget
            key = (table, problem, search, at_once, seed, amount)
            if key in known or time.monotonic() > deadline:
                continue
            started = time.perf_counter()
            row = dict(zip(KEYS, key, strict=True)) | measure(*key[1:])
            row["seconds"] = round(time.perf_counter() - started, 1)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(row, file=sys.stderr)


def read(rows: Path) -> list[Row]:
    """Return what a file of rows holds; nothing when there is none."""
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def _measure_found(problem: str, search: str, at_once: int, seed: int, evaluations: int) -> Row:
    spec = _spec(_task(problem) | {"budget": {"epochs": 1}} | SAMPLERS[search], at_once, seed)
    spec = spec.model_copy(update={"trials": evaluations})
    with tempfile.TemporaryDirectory(prefix="quality-") as root:
        trials = whole(spec, Path(root))
    assert all(trial.state == "complete" for trial in trials), "a trial did not get through"
    assert len(trials) == evaluations
    return {"best": min(trial.value for trial in trials if trial.value is not None)}


def _measure_epochs(problem: str, search: str, at_once: int, seed: int, budget: int) -> Row:
    case = CASES[problem]
    spec = _spec(case.spec | SEARCHES.get(search, {}), at_once, seed)
    last = spec.budget.epochs
    side: Ours | Stock
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


def found_table(size: Size, rows: list[Row]) -> list[Result]:
    """Print the table, and return the lines that have a goal."""
    lines, results = [], []
    for problem, at_once in itertools.product(size.problems, size.at_once):
        losses = {
            search: [
                row["best"]
                for row in rows
                if _is(row, "found", problem, search, at_once, size)
                and row["size"] == size.evaluations
            ]
            for search in size.searches
        }
        for search, values in losses.items():
            if len(values) < 2:
                continue
            low, high = _interval(np.mean, values)
            chance = _less(values, losses.get("random", []))
            lines.append(
                (
                    problem,
                    str(at_once),
                    search,
                    str(len(values)),
                    f"{np.mean(values):.3f} ({low:.3f} to {high:.3f})",
                    f"{np.median(values):.3f}",
                    PUBLISHED.get((problem, search), ""),
                    "" if search == "random" else f"{chance:.2g}",
                )
            )
            if search == "tpe":
                row = f"P9 {problem}, {at_once} at once, {len(values)} seeds: p of tpe = random"
                results.append(Result(row, chance, None, "", (), Goal("ours", 0.05)))
    print(f"the best of {size.evaluations} evaluations, the whole path\n")
    head = ("problem", "at once", "sampler", "seeds", "mean (95 %)", "median", "published", "p")
    print(_ruled([head, *lines]))
    return results


def epochs_table(size: Size, rows: list[Row]) -> list[Result]:
    """Print the table, and return the lines that have a goal."""
    lines, results = [], []
    for problem, at_once in itertools.product(size.problems, size.at_once):
        case = CASES[problem]
        for level in case.levels:
            spent = {
                search: [
                    row["reached"].get(str(level), case.budget)
                    for row in rows
                    if _is(row, "epochs", problem, search, at_once, size)
                    and row["size"] == case.budget
                ]
                for search in size.searches
            }
            for search, values in spent.items():
                if len(values) < 2:
                    continue
                low, high = _interval(np.median, values)
                lines.append(
                    (
                        problem,
                        f"{level:g}",
                        search,
                        f"{sum(one < case.budget for one in values)} of {len(values)}",
                        f"{np.median(values):.0f} ({low:.0f} to {high:.0f})",
                        *(_against(spent.get(peer, []), values) for peer in PEERS),
                    )
                )
            if level == case.levels[0]:
                results += _goals(f"P9 {problem} to {level:g}", spent)
    print("epochs until the best trial is as good; at once:", *size.at_once, end="\n\n")
    head = (
        "problem",
        "to",
        "search",
        "reached",
        "median epochs (95 %)",
        "stock / it",
        "random / it",
    )
    print(_ruled([head, *lines]))
    return results


def _goals(row: str, spent: dict[str, list[int]]) -> list[Result]:
    """Ours divided by each peer's; as the ratios stand the interval's ends and the middle."""
    ours, results = spent.get(OURS, []), []
    for peer, goal in ((STOCK, 1 / 1.5), (RANDOM, 1 / 5)):
        theirs = spent.get(peer, [])
        if len(ours) > 1 and len(theirs) > 1:
            low, high = _ratio_interval(ours, theirs)
            middle = float(np.median(ours) / np.median(theirs))
            results.append(
                Result(
                    f"{row}, {len(ours)} seeds (95 %) / {peer}",
                    float(np.median(ours)),
                    float(np.median(theirs)),
                    "epochs",
                    (low, middle, high),
                    Goal("ratio", goal),
                )
            )
    return results


def _against(peer: Sequence[float], values: Sequence[float]) -> str:
    if len(peer) < 2 or peer == values:
        return ""
    low, high = _ratio_interval(peer, values)
    ratio = np.median(peer) / np.median(values)
    return f"{ratio:.2f} ({low:.2f} to {high:.2f}) p {_less(values, peer):.2g}"


def _interval(of: Callable[..., Any], values: Sequence[float]) -> tuple[float, float]:
    found = stats.bootstrap((values,), of, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def _ratio_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    def ratio(a: Any, b: Any, axis: int) -> Any:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    found = stats.bootstrap((first, second), ratio, method="percentile", rng=0)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _less(values: Sequence[float], others: Sequence[float]) -> float:
    """The probability, if both were alike, that `values` come out so much smaller."""
    if not others:
        return float("nan")
    return float(stats.mannwhitneyu(values, others, alternative="less").pvalue)


def _is(row: Row, table: str, problem: str, search: str, at_once: int, size: Size) -> bool:
    kind = tuple(row[key] for key in KEYS[:4])
    return kind == (table, problem, search, at_once) and row["seed"] < size.seeds


def _ruled(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
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
