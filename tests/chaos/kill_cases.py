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
from collections.abc import Iterator, Mapping
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
    """`memory`: tensors. `loader`: a data set. `processes`: a data set and two processes.
    `weighted`, `bucketed`: the same by a sampler or a batch sampler. `stream`: through a shuffle
    buffer, whose state is saved; `stream-processes` in two processes. `skipped`: without a state.
    """
    clip: str
    schedule: str
    """`own`: a function of the user's."""
    optimizer: str
    """`schedule-free`: a class of the user's, which evaluates other weights than it trains. `two`:
    Muon and AdamW, each for a part of the parameters."""
    every: str
    hooks: str = "none"
    """`hooks`: the task has hooks and logs sums over an epoch. `none`: it has not."""
    average: str = "off"
    """`ema` and `swa` begin before some kills and after others."""
    parameters: str = "all"
    """`trained`: the first layer is frozen, and no checkpoint has it."""
    budget: str = "epochs"
    """`epochs`: each ends with a report. `halves`: each half does. Else reports fall anywhere."""
    workers: int = 1
    """How many ranks train. Three, because the sum of two gradients has only one order."""
    victim: int = 0
    """The rank that dies. The last of three has no samples in an epoch's last window."""
    death: str = "exit"
    """`exit`: it ends itself by os._exit. `sigkill`: the kernel ends it."""

    @property
    def killer(self) -> int:
        """The rank that comes to the place of the kill; it kills the victim, often itself."""
        only_on_first = self.kill == "saving" or (self.kill, self.hooks) == ("evaluation", "hooks")
        return 0 if only_on_first else self.victim

    def __str__(self) -> str:
        return "-".join(map(str, self)).replace(" ", "")


AXES: dict[str, tuple[str | int, ...]] = {
    "kill": ("window", "epoch", "warmup", "evaluation", "edge", "saving", "saved"),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 3),
    "data": (
        "memory",
        "loader",
        "processes",
        "weighted",
        "bucketed",
        "stream",
        "stream-processes",
        "skipped",
    ),
    "clip": ("norm", "value", "off"),
    "schedule": ("cosine", "onecycle", "plateau", "step", "linear", "wsd", "own"),
    "optimizer": ("adamw", "nesterov", "adafactor", "amsgrad", "nadam", "schedule-free", "two"),
    "every": ("1 epoch", "1 report", "2 steps", "3 steps"),
    "hooks": ("none", "hooks"),
    "average": ("off", "ema", "swa"),
    "parameters": ("all", "trained"),
    "budget": ("epochs", "steps", "samples", "halves"),
    "workers": (1, 3),
    "victim": (0, 1, 2),
    "death": ("exit", "sigkill"),
}

# One of each kill, for every day (`tests/integration/test_resume_after_exit.py`).
SLICE = (
    Case("window", "fp16", 3, "loader", "norm", "cosine", "two", "2 steps", budget="steps"),
    Case("epoch", "bf16", 1, "memory", "value", "onecycle", "nesterov", "3 steps", average="ema"),
    Case("warmup", "fp32", 3, "weighted", "norm", "own", "adamw", "2 steps", parameters="trained"),
    Case(
        *("evaluation", "fp32", 1, "processes", "off", "wsd", "schedule-free", "2 steps"),
        hooks="hooks",
        budget="samples",
    ),
    Case(
        *("edge", "fp16", 1, "skipped", "value", "step", "adafactor", "3 steps"),
        average="ema",
        parameters="trained",
        budget="steps",
    ),
    Case("saving", "bf16", 3, "bucketed", "norm", "plateau", "amsgrad", "1 epoch", hooks="hooks"),
    Case(
        *("saved", "fp32", 3, "stream-processes", "off", "cosine", "nesterov", "1 report"),
        hooks="hooks",
        average="swa",
        budget="halves",
    ),
    Case("window", "fp32", 3, "stream", "off", "cosine", "nesterov", "3 steps", hooks="hooks"),
    Case(
        *("window", "fp32", 3, "loader", "norm", "cosine", "adamw", "2 steps"),
        workers=3,
        victim=2,
        death="sigkill",
    ),
    Case(
        *("evaluation", "fp16", 1, "stream", "norm", "plateau", "nesterov", "3 steps"),
        hooks="hooks",
        average="ema",
        workers=3,
        victim=0,
    ),
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
        case = _draw_with(draw, ())
        with_processes = sum(c.data.endswith("processes") for c in chosen)
        if not case.data.endswith("processes") or with_processes < _MOST_WITH_PROCESSES:
            chosen[case] = None
    return list(chosen)


def pairs(case: Case) -> set[tuple[tuple[str, object], ...]]:
    """Return the pairs of (axis, value) that meet in a case."""
    return set(itertools.combinations(zip(AXES, case, strict=True), 2))


def _pairs_of_axes() -> Iterator[tuple[tuple[str, object], ...]]:
    for one, other in itertools.combinations(AXES, 2):
        for first, second in itertools.product(AXES[one], AXES[other]):
            if not is_refused({one: first, other: second}):
                yield (one, first), (other, second)


def is_refused(values: Mapping[str, object]) -> bool:
    """Return whether no run has these values.

    A schedule-free optimizer is an average itself. A run of one rank has no other one to kill.
    Only the first rank saves, and calls a task's own `evaluate()`: there another rank cannot end
    itself.
    """
    if values.get("optimizer") == "schedule-free" and values.get("average", "off") != "off":
        return True
    if not values.get("victim", 0):
        return False
    killer = Case(*[values.get(axis, "") for axis in AXES]).killer  # type: ignore[arg-type]
    return values.get("workers") == 1 or (killer == 0 and values.get("death") == "exit")


def _draw_with(draw: random.Random, pair: tuple[tuple[str, object], ...]) -> Case:
    while True:
        values = {axis: draw.choice(of_axis) for axis, of_axis in AXES.items()} | dict(pair)
        if values["workers"] == 1 and "victim" not in dict(pair):
            values["victim"] = 0  # else three of four cases would have several ranks
        if not is_refused(values):
            return Case(**values)  # type: ignore[arg-type]
