"""What a prior saves where it is right, and costs where it is wrong, in epochs to a good trial.

    python -m tests.bench.priors --rows FILE [--minutes 10] [--seeds 20] [--problems ...]

The same search with no prior, with one at the best point, off the best point by one width in each
parameter, in the corner farthest from it, and at the worst point. And with the priors of an
earlier sweep: of the same problem with another seed, of another problem, and of the same problem
upside down, which is as wrong as a history can be. Problems are the closed forms of
`quality_cases` and recorded curves; only tables for designing are used. What is in FILE is not
measured again. What must not live here: counting epochs (`quality_sweeps`), tables
(`curves.tables`).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from sweeps.ledger.warm_start import PriorTrial, best_first, history_priors
from sweeps.spec.priors import PRIOR, WIDTH
from sweeps.spec.search_space import SearchSpace
from sweeps.spec.space import Distribution
from sweeps.spec.spec import SweepSpec
from tests.bench.curves.pool import Pool, PooledOurs
from tests.bench.curves.tables import DESIGN, DESIGN_SEEDS, CurveTable, read_table
from tests.bench.quality_cases import ASHA, problem_spec
from tests.bench.quality_problems import PROBLEMS
from tests.bench.quality_sweeps import Ours, Params, Train, drive
from tests.bench.quality_table import median_interval, ratio_interval, ruled
from tests.bench.rows_file import Row, add_missing, named_file, read
from tests.bench.table import Goal, Result, size

NONE, AT, NEAR, CORNER, WORST = "none", "at the best", "off by a width", "far corner", "worst"
HISTORY, OTHER, REVERSED = "earlier sweep", "earlier sweep of another task", "reversed sweep"
PRIORS = (NONE, AT, NEAR, CORNER, WORST, HISTORY, OTHER, REVERSED)
FORMS = tuple(name for name, one in PROBLEMS.items() if one.speeds)
KEYS = ("seed", "problem", "prior")
"""What a row is known by."""
SEEDS = 20
MOST = 1500
"""Epochs after which a search of a closed form is given up, and counted with so many."""
WORKERS = 4
GOALS = {
    AT: 1 / 1.5,
    NEAR: 1 / 1.5,
    CORNER: 1.2,
    WORST: 1.2,
    HISTORY: 0.6,
    OTHER: 1.1,
    REVERSED: 1.1,
}
"""Epochs with a prior of each kind, as a multiple of those without."""
EARLIER = 24
"""Trials of an earlier sweep."""
_SEARCH = {"search": {"sampler": "tpe"}, "early_stopping": {**ASHA, "scheduler": "asha_promote"}}
_BEST = {
    "branin": (3.141593, 2.275),
    "hartmann6": (0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573),
}
_TRIED = 20_000
"""Random points, of which the worst is taken."""


def places(name: str, kind: str, seed: int) -> list[float] | None:
    """Return where a prior is in the unit cube; None: there is none."""
    if kind == NONE:
        return None
    best, worst = _form_ends(name) if name in PROBLEMS else _table_ends(name)
    if kind == WORST:
        return list(worst)
    if kind == NEAR:
        signs = np.random.default_rng((4, seed)).choice((-1, 1), len(best))
        off = best + signs * WIDTH
        off = np.where((off < 0) | (off > 1), best - signs * WIDTH, off)
        return list(off)
    return list(best) if kind == AT else list(np.where(best < 0.5, 1.0, 0.0))


@functools.cache
def _form_ends(name: str) -> tuple[Any, Any]:
    problem = PROBLEMS[name]
    lows, highs = np.array(problem.bounds).T
    tried = np.random.default_rng(0).random((_TRIED, len(lows)))
    losses = [problem.function(list(lows + one * (highs - lows))) for one in tried]
    return (np.array(_BEST[name.partition("-")[0]]) - lows) / (highs - lows), tried[
        int(np.argmax(losses))
    ]


@functools.cache
def _table_ends(name: str) -> tuple[Any, Any]:
    table = read_table(name)
    return table.places[int(table.truth.argmin())], table.places[int(table.truth.argmax())]


def with_priors(
    space: Mapping[str, Distribution], at: list[float] | None
) -> dict[str, dict[str, Any]]:
    """Return a space as a spec has it, with priors at a place in the unit cube."""
    found = {key: one.to_data() for key, one in space.items()}
    for (key, one), share in zip(space.items(), at or [], strict=False):
        found[key][PRIOR] = one.normalize(one.at(min(share, 1 - 1e-9)))
    return found


def measure(seed: int, name: str, kind: str) -> Row:
    """Run one search; returns after how many epochs its best trial was good enough."""
    search = _Search(name)
    if kind in (HISTORY, OTHER, REVERSED):
        spec = search.spec(None, seed)
        earlier = earlier_trials(name, kind, seed, spec.search_space())
        if earlier:
            update = {"space": history_priors(spec.space, [earlier])}
            spec = spec.model_copy(update=update)
    else:
        spec = search.spec(places(name, kind, seed), seed)
    side, train, regret = search.side(spec, seed)
    lowest, spent, reached = math.inf, 0, None
    reports = drive(side, train, epochs=spec.budget.reports, at_once=WORKERS)
    for spent, report in enumerate(reports, 1):
        if report.loss < lowest:
            lowest = report.loss
            if regret(report.params) <= search.level:
                reached = spent
                break
        if spent == search.most:
            break
    around = sum(trial.from_priors for trial in side.trials())
    return {"reached": reached, "spent": spent, "around": around, "trials": len(side.trials())}


def earlier_trials(name: str, kind: str, seed: int, space: SearchSpace) -> list[PriorTrial]:
    """Run an earlier sweep; returns its trials within a space, the best first."""
    others = [one for one in (FORMS if name in PROBLEMS else DESIGN) if one != name]
    source = others[seed % len(others)] if kind == OTHER else name
    search = _Search(source)
    spec = search.spec(None, seed + 1000).model_copy(update={"trials": EARLIER})
    side, train, _ = search.side(spec, seed + 1000)
    for _ in drive(side, train, epochs=spec.budget.reports, at_once=WORKERS):
        pass
    found = [
        PriorTrial(point, one.value, one.epoch, one.state == "complete")
        for one in side.trials()
        if one.value is not None
        if (point := space.project(one.params)) is not None
    ]
    found = best_first(found, True)
    return found[::-1] if kind == REVERSED else found


class _Search:
    """A problem to be searched, a closed form or a recorded table.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self._form = PROBLEMS.get(name)
        self._table = None if self._form else read_table(name)
        if self._form is not None:
            self._parts = problem_spec(name)
            self.level, self.most = self._form.regrets[0], MOST
        else:
            table = self._known_table
            self._parts = {
                "task": {"name": table.spec.task.name},
                "metric": "val/loss",
                "budget": {"epochs": table.epochs},
                "space": {key: one.to_data() for key, one in table.spec.space.items()},
            }
            self.level, self.most = table.decile, len(table.params) * table.epochs

    @property
    def _known_table(self) -> CurveTable:
        assert self._table is not None
        return self._table

    def spec(self, at: list[float] | None, seed: int) -> SweepSpec:
        """Return the sweep of a search, with priors at a place in the unit cube."""
        whole = {
            "name": "priors",
            "mode": "min",
            "seed": seed,
            "concurrency": WORKERS,
            "resources": {"cpu": 0.5, "gpu": 0},
            "trials": 10_000 if self._form else len(self._known_table.params),
            **_SEARCH,
            **self._parts,
        }
        space = SweepSpec.model_validate(whole).space
        return SweepSpec.model_validate({**whole, "space": with_priors(space, at)})

    def side(self, spec: SweepSpec, seed: int) -> tuple[Ours, Train, Callable[[Params], float]]:
        """Return the searcher, what trains, and the regret of parameters."""
        if (form := self._form) is not None:

            def train(_number: int, params: Params) -> Iterator[float]:
                return (form.loss(params, epoch) for epoch in range(1, form.epochs + 1))

            return Ours(spec), train, lambda params: form.final(params) - form.best
        table = self._known_table
        pool = Pool(table, DESIGN_SEEDS, np.random.default_rng((39, seed)))
        return (
            PooledOurs(spec, pool),
            pool.train,
            lambda params: float(table.regret[pool.index(params)]),
        )


def fill(
    rows: Path,
    problems: Sequence[str],
    kinds: Sequence[str],
    seeds: int,
    *,
    seconds: float = math.inf,
) -> list[Row]:
    """Measure what is missing in a file of rows, seed by seed, and return what it holds."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    keys = itertools.product(range(seeds), problems, kinds)
    add_missing(rows, KEYS, keys, measure, seconds=seconds)
    return read(rows)


def show(rows: list[Row]) -> list[Result]:
    """Print a line for each problem and prior, and return those that have a goal."""
    head = (
        "problem",
        "prior",
        "reached",
        "epochs (95 %)",
        "with / without",
        "of each seed",
        "around",
    )
    lines: list[tuple[str, ...]] = [head]
    results = []
    for name, kind in itertools.product(dict.fromkeys(row["problem"] for row in rows), PRIORS):
        chosen = [row for row in rows if (row["problem"], row["prior"]) == (name, kind)]
        base = [row for row in rows if (row["problem"], row["prior"]) == (name, NONE)]
        if len(chosen) < 2 or len(base) < 2:
            continue
        mine, theirs = ([_epochs(row) for row in some] for some in (chosen, base))
        ratio = float(np.median(mine) / np.median(theirs))
        ends = ratio_interval(mine, theirs)
        low, high = median_interval(mine)
        of_all = (
            np.median([row["around"] for row in chosen]),
            np.median([row["trials"] for row in chosen]),
        )
        lines.append(
            (
                name,
                kind,
                f"{sum(row['reached'] is not None for row in chosen)} of {len(chosen)}",
                f"{np.median(mine):.0f} ({low:.0f} to {high:.0f})",
                "" if kind == NONE else f"{ratio:.2f} ({ends[0]:.2f} to {ends[1]:.2f})",
                "" if kind == NONE else _of_each_seed(chosen, base),
                f"{of_all[0]:.0f} of {of_all[1]:.0f} trials",
            )
        )
        if kind != NONE:
            goal = Goal("ratio", GOALS[kind])
            title = f"priors {name}, {kind}, {len(chosen)} seeds (95 %) / no prior"
            spread = (ends[0], ratio, ends[1])
            mid, other = float(np.median(mine)), float(np.median(theirs))
            results.append(Result(title, mid, other, "epochs", spread, goal))
    print(ruled(lines))
    return results


def _of_each_seed(chosen: list[Row], base: list[Row]) -> str:
    """Return the geometric mean of the ratios of searches that have the same seed."""
    theirs = {row["seed"]: _epochs(row) for row in base}
    logs = [
        math.log(_epochs(row) / theirs[row["seed"]]) for row in chosen if row["seed"] in theirs
    ]
    spread = 1.96 * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    low, middle, high = (math.exp(float(np.mean(logs)) + one * spread) for one in (-1, 0, 1))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _epochs(row: Row) -> int:
    """Return the epochs that a search took; all that it had, where it was never good enough."""
    return int(row["spent"] if row["reached"] is None else row["reached"])


def priors(repeats: int) -> list[Result]:
    """Measure all; the seeds are the repeats."""
    del repeats
    rows = named_file("PRIORS_ROWS")
    return show(fill(rows, (*FORMS, *DESIGN), PRIORS, size(SEEDS, 2)))


def main() -> None:
    """Measure a portion, and print the table of what there is by now."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.priors", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="one search to a line")
    parser.add_argument("--minutes", type=float, default=math.inf, help="0: only the table")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--problems", nargs="+", default=[*FORMS, *DESIGN])
    parser.add_argument("--priors", nargs="+", default=PRIORS, choices=PRIORS)
    options = parser.parse_args()
    show(
        fill(
            options.rows,
            options.problems,
            options.priors,
            options.seeds,
            seconds=60 * options.minutes,
        )
    )


if __name__ == "__main__":
    main()
