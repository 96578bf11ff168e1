"""What the field is compared on: recorded curves, and closed forms whose curves are invented.

Both have the same scale: regret 0 is the best configuration there is, 1 the median one. What must
not live here: searches, and measures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import qmc

from sweeps.spec.space import Distribution
from sweeps.spec.spec import SweepSpec
from tests.bench.curves.pool import Pool
from tests.bench.curves.tables import DESIGN, DESIGN_SEEDS, HOLDOUT, CurveTable, Params, read_table
from tests.bench.quality_cases import problem_spec
from tests.bench.quality_problems import PROBLEMS, Problem
from tests.bench.quality_sweeps import Train

BUDGET = 10
"""Full trainings that a search is told of, and after whose epochs regrets are compared."""
HORIZON = 40
"""Full trainings after whose epochs a search of a closed form ends, so that few costs to the
target are cut off. One of a table ends at the budget: it would use up the configurations, and show
the one whose single training was luckiest."""
FORMS = tuple(name for name, one in PROBLEMS.items() if one.speeds)
_POINTS = 4096
"""Of a closed form whose median is regret 1."""


@dataclass(frozen=True)
class Round:
    """What one search meets.

    Attributes:
        train: Yields the losses of a configuration.
        seconds: What an epoch of a configuration takes.
        regret: What a configuration is worth.
        take: Replaces what is proposed by what is trained; LookupError when nothing is left.
    """

    train: Train
    seconds: Callable[[Params, int], float]
    regret: Callable[[Params], float]
    take: Callable[[Params], Params]
    pool: Pool | None = None


@dataclass(frozen=True)
class Ground:
    """A problem of the field.

    Attributes:
        epochs: Of a full training.
        level: The regret at which a search is done.
        size: How many configurations there are; None for any number.
        holdout: Nobody looks at it while a search is designed.
    """

    name: str
    epochs: int
    level: float
    size: int | None
    holdout: bool
    space: Mapping[str, Distribution]
    spec: Callable[..., SweepSpec]
    start: Callable[[int], Round]
    table: CurveTable | None = None

    @property
    def budget(self) -> int:
        """Epochs that a search is told of."""
        return BUDGET * self.epochs

    @property
    def horizon(self) -> int:
        """Epochs after which a search ends."""
        return self.budget if self.size else HORIZON * self.epochs

    def points(self, random: np.random.Generator) -> Iterator[Params]:
        """Yield configurations at random, those of a table without replacement."""
        if self.table is not None:
            yield from (self.table.params[one] for one in random.permutation(self.size or 0))
            return
        while True:
            yield {key: one.at(random.random()) for key, one in self.space.items()}


def _spec(task: dict[str, Any], workers: int, seed: int, parts: Mapping[str, Any]) -> SweepSpec:
    usual = {"name": "field", "mode": "min", "trials": 10_000, "resources": {"cpu": 0.5, "gpu": 0}}
    return SweepSpec.model_validate(
        {**usual, "seed": seed, "concurrency": workers, **task, **parts}
    )


def _recorded(name: str) -> Ground:
    table = read_table(name)
    task = {
        "task": {"name": table.spec.task.name},
        "metric": "val/loss",
        "trials": len(table.params),
        "budget": {"epochs": table.epochs},
        "space": {key: one.to_data() for key, one in table.spec.space.items()},
    }

    def start(seed: int) -> Round:
        pool = Pool(table, DESIGN_SEEDS, np.random.default_rng((39, seed)))
        return Round(
            train=pool.train,
            seconds=pool.seconds,
            regret=lambda params: float(table.regret[pool.index(params)]),
            take=lambda params: table.params[pool.take_nearest(params)],
            pool=pool,
        )

    return Ground(
        name,
        table.epochs,
        table.decile,
        len(table.params),
        name in HOLDOUT,
        table.spec.space,
        partial(_spec, task),
        start,
        table,
    )


def _closed_form(name: str) -> Ground:
    problem = PROBLEMS[name]
    spec = partial(_spec, problem_spec(name))
    space = spec(1, 0, {}).space
    scale = _median(problem, space) - problem.best
    whole = Round(
        train=lambda _number, params: (
            problem.loss(params, epoch) for epoch in range(1, problem.epochs + 1)
        ),
        seconds=lambda _params, _epoch: 1.0,
        regret=lambda params: (problem.final(params) - problem.best) / scale,
        take=lambda params: params,
    )
    return Ground(
        name,
        problem.epochs,
        problem.regrets[0] / scale,
        None,
        False,
        space,
        spec,
        lambda _seed: whole,
    )


def _median(problem: Problem, space: Mapping[str, Distribution]) -> float:
    places = qmc.Sobol(len(space), scramble=False).random(_POINTS)
    points = (
        {key: one.at(place) for (key, one), place in zip(space.items(), row, strict=True)}
        for row in places
    )
    return float(np.median([problem.final(point) for point in points]))


@functools.cache
def ground(name: str) -> Ground:
    """Return a problem by its name."""
    return _closed_form(name) if name in FORMS else _recorded(name)


def names() -> list[str]:
    """Return the names of all problems, those for designing first."""
    return [*DESIGN, *FORMS, *HOLDOUT]
