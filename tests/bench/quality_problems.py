"""Problems whose best value is known: as plain functions, and as a loop that a sweep runs.

    task: {name: tests.bench.quality_problems:run, problem: hartmann6-crossing}

The functions are those of D. Jones, "A taxonomy of global optimization methods based on response
surfaces" (2001) and L. Dixon, G. Szegö, "Towards global optimisation 2" (1978), with the domains
of scikit-optimize's benchmarks. Learning curves are the family pow3 of T. Domhan, J. Springenberg,
F. Hutter, "Speeding up automatic hyperparameter optimization of deep neural networks by
extrapolation of learning curves" (2015), c + a (t + 1)^-alpha, with c and a chosen so that a
training begins at the function's worst value and is the function's value after its last epoch.

What must not live here: sweeps, samplers, torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainable import Context, TrialConfig

METRIC = "loss"
EPOCHS = 27
"""Of a full training of those that have a learning curve: three rungs of a reduction by 3."""

_ALPHA = (1.0, 1.2, 3.0, 3.2)
_A = (
    (10.0, 3.0, 17.0, 3.5, 1.7, 8.0),
    (0.05, 10.0, 17.0, 0.1, 8.0, 14.0),
    (3.0, 3.5, 1.7, 10.0, 17.0, 8.0),
    (17.0, 8.0, 0.05, 10.0, 0.1, 14.0),
)
_P = (
    (0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886),
    (0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991),
    (0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650),
    (0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381),
)


def branin(x: list[float]) -> float:
    """Branin's function; three minima."""
    first, second = x
    valley = second - 5.1 / (4 * math.pi**2) * first**2 + 5 / math.pi * first - 6
    return valley**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(first) + 10


def hartmann6(x: list[float]) -> float:
    """Hartmann's function of six variables; one minimum and three basins beside it."""
    return -sum(
        alpha
        * math.exp(-sum(a * (one - p) ** 2 for one, a, p in zip(x, a_row, p_row, strict=True)))
        for alpha, a_row, p_row in zip(_ALPHA, _A, _P, strict=True)
    )


@dataclass(frozen=True)
class Problem:
    """A function to be minimised, of parameters `x0`, `x1`, ...

    Attributes:
        function: The loss at the end of a training.
        bounds: Of each parameter.
        best: The least value there is.
        worst: The loss before a training begins.
        speeds: The learning curve's exponent at either end of the first parameter; None when
            there is no curve, and a training is one evaluation.
        regrets: What remains above `best` when a search is called done, the middle one first.
    """

    function: Callable[[list[float]], float]
    bounds: tuple[tuple[float, float], ...]
    best: float
    worst: float
    speeds: tuple[float, float] | None = None
    regrets: tuple[float, ...] = ()

    @property
    def epochs(self) -> int:
        return EPOCHS if self.speeds else 1

    @property
    def space(self) -> dict[str, dict[str, list[float]]]:
        """As a spec has it."""
        return {f"task.x{i}": {"uniform": list(bounds)} for i, bounds in enumerate(self.bounds)}

    def final(self, params: Mapping[str, float]) -> float:
        """The loss at the end of a training, by the spec's or by the task's names."""
        place = {key.removeprefix("task."): value for key, value in params.items()}
        return self.function([place[f"x{i}"] for i in range(len(self.bounds))])

    def loss(self, params: Mapping[str, float], epoch: int) -> float:
        """The loss after an epoch, counted from 1."""
        final = self.final(params)
        if self.speeds is None:
            return final
        low, high = self.bounds[0]
        place = {key.removeprefix("task."): value for key, value in params.items()}
        slow, fast = self.speeds
        alpha = slow + (fast - slow) * (place["x0"] - low) / (high - low)
        last = float((1 + EPOCHS) ** -alpha)
        left = float((1 + epoch) ** -alpha)
        return final + (self.worst - final) * (left - last) / (1 - last)


_BRANIN = (branin, ((-5.0, 10.0), (0.0, 15.0)), 0.397887, 308.129096)
_HARTMANN = (hartmann6, ((0.0, 1.0),) * 6, -3.322368, 0.0)
_ALIKE, _CROSSING = (1.0, 1.0), (0.25, 1.5)

PROBLEMS = {
    "branin": Problem(*_BRANIN),
    "hartmann6": Problem(*_HARTMANN),
    # All learn at the same speed: who is ahead after an epoch stays it.
    "branin-alike": Problem(*_BRANIN, _ALIKE, (0.5, 1.0, 0.2)),
    "hartmann6-alike": Problem(*_HARTMANN, _ALIKE, (0.6, 1.0, 0.3)),
    # The first parameter says how fast, and who learns slowly is not for that reason worse.
    "branin-crossing": Problem(*_BRANIN, _CROSSING, (0.5, 1.0, 0.2)),
    "hartmann6-crossing": Problem(*_HARTMANN, _CROSSING, (0.6, 1.0, 0.3)),
}


def run(
    config: TrialConfig, context: Context
) -> Iterator[dict[str, float] | tuple[dict[str, float], dict[str, int]]]:
    """Evaluate a problem as if it were trained; `config.task` holds its name and parameters."""
    params = dict(config.task.arguments)
    problem = PROBLEMS[params.pop("problem")]
    for epoch in context.remaining_epochs():
        metrics = {METRIC: problem.loss(params, epoch + 1)}
        # A training of one epoch has nothing to go on from.
        yield (metrics, {"epoch": epoch}) if problem.speeds else metrics
