"""The runs to kill and the places of the kill: a covering selection of all combinations.

The axes have far more combinations than can be run. The selection takes the cheapest set in which
every pair of values of two axes meets at least once, and fills up with random combinations drawn
from a seed that is printed and can be given again (`CHAOS_SEED=7 make chaos`). What must not live
here: how a case is run (see `killed_runs.py` and `processes.py`).
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

SEED = int(os.environ.get("CHAOS_SEED", "20261120"))
COUNT = int(os.environ.get("CHAOS_CASES", "280"))
# A loader with processes of its own costs a hundred times what the rest of a case costs.
_MOST_WITH_PROCESSES = 36


class Case(NamedTuple):
    """One run and where it is killed. Every run has dropout and augmentation."""

    kill: str
    """`window`: between two micro-batches, or within the only one. `epoch`, `warmup`: between two
    steps. `evaluation`. `edge`: the epoch is closed, nothing is saved. `saving`: the checkpoint is
    written and not yet in place. `saved`: the epoch's checkpoint is in place, nobody was told."""
    precision: str
    accumulation: int
    data: str
    """`memory`: tensors. `loader`: a data set. `processes`: a data set and two processes."""
    clip: str
    schedule: str
    optimizer: str
    every: str
    hooks: str
    """`hooks`: the task has hooks and logs sums over an epoch. `none`: it has not."""

    def __str__(self) -> str:
        return "-".join(map(str, self)).replace(" ", "")


AXES: dict[str, tuple[str | int, ...]] = {
    "kill": ("window", "epoch", "warmup", "evaluation", "edge", "saving", "saved"),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 3),
    "data": ("memory", "loader", "processes"),
    "clip": ("norm", "value", "off"),
    "schedule": ("cosine", "onecycle", "plateau", "step", "linear"),
    "optimizer": ("adamw", "nesterov", "adafactor"),
    "every": ("1 epoch", "2 steps", "3 steps"),
    "hooks": ("none", "hooks"),
}

# One of each kill, for every day (`tests/integration/test_resume_after_exit.py`).
SLICE = (
    Case("window", "fp16", 3, "loader", "norm", "cosine", "adamw", "2 steps", "hooks"),
    Case("epoch", "bf16", 1, "memory", "value", "onecycle", "nesterov", "3 steps", "none"),
    Case("warmup", "fp32", 3, "memory", "norm", "linear", "adamw", "2 steps", "hooks"),
    Case("evaluation", "fp32", 1, "processes", "off", "plateau", "adamw", "2 steps", "hooks"),
    Case("edge", "fp16", 1, "loader", "value", "step", "adafactor", "1 epoch", "none"),
    Case("saving", "bf16", 3, "loader", "norm", "plateau", "adamw", "1 epoch", "hooks"),
    Case("saved", "fp32", 3, "memory", "off", "cosine", "nesterov", "1 epoch", "none"),
)


def select(seed: int = SEED, count: int = COUNT) -> list[Case]:
    """Return `count` different cases in which every pair of values of two axes meets.

    Raises:
        ValueError: `count` is too small for that.
    """
    draw = random.Random(seed)
    chosen: dict[Case, None] = {}
    missing = set(_pairs_of_axes())
    while missing:
        candidates = [_draw_with(draw, min(missing)) for _ in range(30)]
        case = max(candidates, key=lambda c: len(missing & pairs(c)))
        chosen[case] = None
        missing -= pairs(case)
    if len(chosen) > count:
        raise ValueError(f"{count} cases cannot hold all pairs; it takes {len(chosen)}")
    while len(chosen) < count:
        case = Case(*(draw.choice(values) for values in AXES.values()))  # type: ignore[arg-type]
        with_processes = sum(c.data == "processes" for c in chosen)
        if case.data != "processes" or with_processes < _MOST_WITH_PROCESSES:
            chosen[case] = None
    return list(chosen)


def pairs(case: Case) -> set[tuple[tuple[str, object], ...]]:
    """Return the pairs of (axis, value) that meet in a case."""
    return set(itertools.combinations(zip(AXES, case, strict=True), 2))


def _pairs_of_axes() -> Iterator[tuple[tuple[str, object], ...]]:
    for one, other in itertools.combinations(AXES, 2):
        for first, second in itertools.product(AXES[one], AXES[other]):
            yield (one, first), (other, second)


def _draw_with(draw: random.Random, pair: tuple[tuple[str, object], ...]) -> Case:
    values = {axis: draw.choice(of_axis) for axis, of_axis in AXES.items()} | dict(pair)
    return Case(**values)  # type: ignore[arg-type]
