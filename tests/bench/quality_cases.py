"""What P9 compares: searches as fragments of a spec, problems, and how much of each is measured.

What must not live here: measuring, and what is made of it (`quality.py`, `quality_table.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sweeps.spec.spec import SweepSpec
from tests.bench import quality_digits
from tests.bench.quality_problems import METRIC, PROBLEMS, Problem
from tests.bench.quality_sweeps import Params

ASHA: dict[str, Any] = {"scheduler": "asha", "grace_epochs": 1, "reduction": 3}
SAMPLERS: dict[str, dict[str, Any]] = {
    "random": {"search": {"sampler": "random"}},
    "tpe": {"search": {"sampler": "tpe"}},
    "gp": {"search": {"sampler": "gp"}},
}
OURS, STOCK, RANDOM = "asha_promote + tpe", "stock: asha + optuna", "random"
"""What is compared by the goals."""
PEERS = (STOCK, "tpe", RANDOM)
SEARCHES: dict[str, dict[str, Any]] = {
    RANDOM: {"search": {"sampler": "random"}},
    "tpe": {"search": {"sampler": "tpe"}},
    "asha + random": {"search": {"sampler": "random"}, "early_stopping": ASHA},
    "asha + tpe": {"search": {"sampler": "tpe"}, "early_stopping": ASHA},
    OURS: {
        "search": {"sampler": "tpe"},
        "early_stopping": {**ASHA, "scheduler": "asha_promote"},
    },
    "asha_promote + gp": {
        "search": {"sampler": "gp"},
        "early_stopping": {**ASHA, "scheduler": "asha_promote"},
    },
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
        spec=problem_spec(name),
        levels=problem.regrets,
        shown=lambda params, _loss: problem.final(params) - problem.best,
        train=lambda _spec, _number, params: (
            problem.loss(params, epoch) for epoch in range(1, problem.epochs + 1)
        ),
        budget=200 * problem.epochs,
    )


def problem_spec(name: str) -> dict[str, Any]:
    """What a spec says of a closed-form problem."""
    problem = PROBLEMS[name]
    return {
        "task": {"name": "tests.bench.quality_problems:run", "problem": name},
        "metric": METRIC,
        "budget": {"epochs": problem.epochs},
        "space": problem.space,
    }


CASES = {
    **{name: _closed_form(name, one) for name, one in PROBLEMS.items() if one.speeds},
    "digits": Case(
        spec=quality_digits.SPEC,
        levels=(0.1, 0.15, 0.08),
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
