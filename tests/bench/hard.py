"""Whether a search ends worse than random search where it may go wrong.

    python -m tests.bench.hard --rows FILE [--minutes 10] [--seeds 20] [--searches ...] ...

Each search trains for the epochs of 20 full trainings. Then the configuration of the trial that it
shows as the best is judged by its true loss. On the flat problem nothing is better than anything
else, and points are counted that lie further than a hundredth of a range from all earlier ones.
What FILE holds is not measured again. A search more is one line of `SEARCHES`. What must not live
here: problems (`hard_problems.py`), and how a search is driven (`quality_sweeps.py`).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from scipy import stats

from sweeps.spec.spec import SweepSpec
from tests.bench.field.measures import median_ratio
from tests.bench.hard_problems import HARD, HardProblem
from tests.bench.quality_cases import ASHA
from tests.bench.quality_problems import EPOCHS, METRIC
from tests.bench.quality_sweeps import Ours, drive, own_seed
from tests.bench.quality_table import median_interval, ruled
from tests.bench.rows_file import Row, add_missing, named_file, read
from tests.bench.table import Goal, Result, size

RANDOM = "random"
_PROMOTE = {**ASHA, "scheduler": "asha_promote"}
SEARCHES: dict[str, dict[str, Any]] = {
    RANDOM: {"search": {"sampler": "random"}},
    "random + asha": {"search": {"sampler": "random"}, "early_stopping": ASHA},
    "tpe": {"search": {"sampler": "tpe"}},
    "tpe + asha": {"search": {"sampler": "tpe"}, "early_stopping": ASHA},
    "tpe + asha_promote": {"search": {"sampler": "tpe"}, "early_stopping": _PROMOTE},
    "qmc": {"search": {"sampler": "qmc"}},
    "cmaes": {"search": {"sampler": "cmaes"}},
    "nsgaii": {"search": {"sampler": "nsgaii"}},
    "random + hyperband": {
        "search": {"sampler": "random"},
        "early_stopping": {**ASHA, "scheduler": "hyperband"},
    },
    "random + median": {
        "search": {"sampler": "random"},
        "early_stopping": {"scheduler": "median", "grace_epochs": 1},
    },
    "gp": {"search": {"sampler": "gp"}},
    "gp + asha_promote": {"search": {"sampler": "gp"}, "early_stopping": _PROMOTE},
}
WORKERS = (1, 4, 16)
SEEDS = 20
BUDGET = 20 * EPOCHS
_KEYS = ("problem", "workers", "search", "seed")
_WORSE = 0.05


def hard(repeats: int) -> list[Result]:
    """Regrets against random search; the seeds are the repeats."""
    del repeats
    rows = named_file("HARD_ROWS")
    fill(rows, list(HARD), list(WORKERS), list(SEARCHES), size(SEEDS, 1))
    return show(read(rows))


def fill(
    rows: Path,
    problems: Sequence[str],
    workers: Sequence[int],
    searches: Sequence[str],
    seeds: int,
    *,
    seconds: float = float("inf"),
) -> None:
    """Measure what is missing in a file of rows, seed by seed, for so many seconds."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    keys = [
        (problem, at_once, search, seed)
        for seed, problem, at_once, search in itertools.product(
            range(seeds), problems, workers, searches
        )
    ]
    add_missing(rows, _KEYS, keys, measure, seconds=seconds)


def measure(name: str, workers: int, search: str, seed: int) -> Row:
    """Search a problem once, and return how it ended."""
    problem, drawn = HARD[name], own_seed(search, seed)
    spec = SweepSpec.model_validate(
        {
            "name": "hard",
            "task": {"name": "tests.bench.quality_problems:run"},
            "metric": METRIC,
            "mode": "min",
            "trials": 10_000,
            "seed": drawn,
            "concurrency": workers,
            "budget": {"epochs": EPOCHS},
            "resources": {"cpu": 1, "gpu": 0},
            "space": problem.space,
            **SEARCHES[search],
        }
    )
    side = Ours(spec)
    train = functools.partial(problem.train, drawn)
    reports = drive(side, train, epochs=EPOCHS, at_once=workers)
    for _ in itertools.islice(reports, BUDGET):
        pass
    best, trials = side.best(), side.trials()
    return {
        "regret": None if best is None else problem.regret(best.params),
        "trials": len(trials),
        "failed": sum(trial.state == "failed" for trial in trials),
        "distinct": _distinct(problem, [trial.params for trial in trials]),
    }


def _distinct(problem: HardProblem, points: list[dict[str, Any]]) -> int:
    """Return how many points of the unit square lie apart; 0 for another space."""
    if problem is not HARD["flat"]:
        return 0
    kept: list[np.ndarray[Any, Any]] = []
    for place in (np.array(list(point.values())) for point in points):
        if all(np.abs(place - other).max() > 0.01 for other in kept):
            kept.append(place)
    return len(kept)


def show(rows: list[Row]) -> list[Result]:
    """Print the table, and return one line: how many searches end worse than random search."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["problem"], row["workers"], row["search"]), []).append(row)
    chances = _chances(found)
    lines: list[tuple[str, ...]] = [
        (
            "problem",
            "workers",
            "search",
            "seeds",
            "median (95 %)",
            "/ random (95 %)",
            "p of worse",
            "Holm",
            "trials",
            "fail",
        )
    ]
    order = {name: index for index, name in enumerate(SEARCHES)}
    for key in sorted(found, key=lambda one: (list(HARD).index(one[0]), one[1], order[one[2]])):
        problem, workers, search = key
        mine = found[key]
        trials = [row["trials"] for row in mine]
        ratio = ""
        if problem == "flat":
            middle = f"{np.median([row['distinct'] for row in mine]):.0f} apart"
        else:
            regrets = [_regret(row) for row in mine]
            low, high = median_interval(regrets) if len(regrets) > 1 else (regrets[0], regrets[0])
            middle = f"{np.median(regrets):.3g} ({low:.3g} to {high:.3g})"
            if random := found.get((problem, workers, RANDOM)):
                one = median_ratio([regrets], [[_regret(row) for row in random]])
                ratio = f"{one.middle:.2g} ({one.low:.2g} to {one.high:.2g})"
        failed = sum(row["failed"] for row in mine) / max(1, sum(trials))
        lines.append(
            (
                *(problem, str(workers), search, str(len(mine)), middle, ratio),
                *([f"{one:.2g}" for one in chances[key]] if key in chances else ["", ""]),
                *(f"{np.median(trials):.0f}", f"{failed:.0%}"),
            )
        )
    print(f"true regret of the trial shown after {BUDGET} epochs\n")
    print(ruled(lines))
    num_worse = sum(adjusted < _WORSE for _, adjusted in chances.values())
    what = f"searches worse than random search (Holm's p < {_WORSE}), of {len(chances)}"
    return [Result(what, float(num_worse), None, "", (), Goal("ours", 0))]


def _chances(
    found: dict[tuple[str, int, str], list[Row]],
) -> dict[tuple[str, int, str], tuple[float, float]]:
    """Return p of each search and problem that random search had, too, and p by Holm.

    It is the probability, if both were alike, that a search ends so much worse (Mann-Whitney,
    one-sided). A search with so many workers is one family of tests, of which each problem is one.
    """
    chances: dict[tuple[str, int, str], tuple[float, float]] = {}
    for workers, search in dict.fromkeys(key[1:] for key in found if key[2] != RANDOM):
        tests = {
            (problem, workers, search): float(
                stats.mannwhitneyu(
                    [_regret(row) for row in found[problem, workers, search]],
                    [_regret(row) for row in found[problem, workers, RANDOM]],
                    alternative="greater",
                ).pvalue
            )
            for problem in HARD
            if problem != "flat"
            and (problem, workers, search) in found
            and (problem, workers, RANDOM) in found
        }
        for key, adjusted in zip(tests, holm(list(tests.values())), strict=True):
            chances[key] = tests[key], adjusted
    return chances


def holm(chances: Sequence[float]) -> list[float]:
    """Return p of each of several tests so that one of them all errs as often as one alone.

    S. Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    adjusted, least = [0.0] * len(chances), 0.0
    for rank, index in enumerate(np.argsort(chances, kind="stable")):
        least = max(least, min(1.0, (len(chances) - rank) * chances[index]))
        adjusted[index] = least
    return adjusted


def _regret(row: Row) -> float:
    return float("inf") if row["regret"] is None else float(row["regret"])


def main() -> None:
    """Measure a portion, and print the table of what there is by now."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hard", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="one search to a line")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="0: only the table")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--problems", nargs="+", choices=HARD, default=list(HARD))
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    options = parser.parse_args()
    if options.minutes:
        fill(
            options.rows,
            options.problems,
            options.workers,
            options.searches,
            options.seeds,
            seconds=60 * options.minutes,
        )
    for result in show(read(options.rows)):
        print(f"\n{result.row}: {result.ours:.0f}", file=sys.stderr)


if __name__ == "__main__":
    main()
