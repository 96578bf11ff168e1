"""Problems on which a search may go wrong: flat, failing, noisy, crossing, mixed, conditional.

Curves are those of `quality_problems`. What must not live here: searches and counting (`hard.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.bench.quality_problems import EPOCHS, PROBLEMS

Params = Mapping[str, Any]


@dataclass(frozen=True)
class HardProblem:
    """A problem whose trainings have curves.

    Attributes:
        space: As a spec has it.
        final: The true loss at the end of a training.
        best: The least one.
        curve: The loss after an epoch, without noise.
        noise: The standard deviation of each report.
        fails: Whether a training reports NaN.
    """

    space: dict[str, Any]
    final: Callable[[Params], float]
    best: float
    curve: Callable[[Params, int], float]
    noise: float = 0.0
    fails: Callable[[Params], bool] = lambda _: False

    def regret(self, params: Params) -> float:
        """Return how much worse a configuration truly is than the best one."""
        return self.final(params) - self.best

    def train(self, seed: int, number: int, params: Params) -> Iterator[float]:
        """Yield the loss after each epoch; ends early where the training fails."""
        draw = random.Random(f"{seed} {number}")
        if not self.fails(params):
            for epoch in range(1, EPOCHS + 1):
                yield self.curve(params, epoch) + self.noise * draw.gauss(0, 1)


def _known(
    name: str, *, noise: float = 0.0, fails: Callable[[Params], bool] = lambda _: False
) -> HardProblem:
    one = PROBLEMS[name]
    return HardProblem(one.space, one.final, one.best, one.loss, noise, fails)


def _falling(space: dict[str, Any], final: Callable[[Params], float]) -> HardProblem:
    """A loss that falls from 3 to the final one, with an optimum of 0."""

    def curve(params: Params, epoch: int) -> float:
        end, last = final(params), 1 / (1 + EPOCHS)
        return end + (3.0 - end) * (1 / (1 + epoch) - last) / (1 - last)

    return HardProblem(space, final, 0.0, curve)


def _mixed(params: Params) -> float:
    kind = "abcd".index(params["task.kind"])
    rate = math.log10(params["task.rate"]) / 4 + 1
    return float(
        (0.0, 0.1, 0.25, 0.4)[kind]
        + 2 * (params["task.x"] - (0.2, 0.4, 0.6, 0.8)[kind]) ** 2
        + 2 * (rate - 0.7) ** 2
        + ((params["task.layers"] - 5) / 8) ** 2
    )


def _conditional(params: Params) -> float:
    rate = math.log10(params["task.rate"]) / 4 + 1
    if params["task.kind"] == "sgd":
        return float(0.05 + 2 * (rate - 0.8) ** 2 + 2 * (params["task.momentum"] - 0.9) ** 2)
    beta, width = params["task.beta"], params["task.width"]
    return float(2 * (rate - 0.3) ** 2 + 2 * (beta - 0.8) ** 2 + (width - 0.5) ** 2)


_UNIT = {"uniform": [0, 1]}
_RATE = {"loguniform": [1e-4, 1.0]}
_FLAT = HardProblem({"task.x0": _UNIT, "task.x1": _UNIT}, lambda _: 0.5, 0.5, lambda *_: 0.5)

HARD = {
    "flat": _FLAT,
    # A fifth of the space, from beside one of three optima on; beside the only one.
    "nan-branin": _known("branin-alike", fails=lambda p: bool(3.3 < p["task.x0"] < 6.3)),
    "nan-hartmann6": _known("hartmann6-alike", fails=lambda p: bool(0.22 < p["task.x0"] < 0.42)),
    "noise-branin": _known("branin-alike", noise=10.0),
    "noise-hartmann6": _known("hartmann6-alike", noise=0.5),
    "branin-crossing": _known("branin-crossing"),
    "hartmann6-crossing": _known("hartmann6-crossing"),
    "mixed": _falling(
        {
            "task.x": _UNIT,
            "task.rate": _RATE,
            "task.layers": {"int": [1, 8]},
            "task.kind": {"choice": ["a", "b", "c", "d"]},
        },
        _mixed,
    ),
    "conditional": _falling(
        {
            "task.kind": {"choice": ["sgd", "adam"]},
            "task.rate": _RATE,
            "task.momentum": {"uniform": [0, 1], "when": {"task.kind": "sgd"}},
            "task.beta": {"uniform": [0, 1], "when": {"task.kind": "adam"}},
            "task.width": {"uniform": [0, 1], "when": {"task.kind": "adam"}},
        },
        _conditional,
    ),
}
