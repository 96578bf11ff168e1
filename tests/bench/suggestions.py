"""What a suggestion of TPE costs in a large sweep, and how good its choice among a front is.

What must not live here: how many epochs a search needs (`field`, `quality`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import optuna
from optuna._hypervolume import compute_hypervolume
from optuna._hypervolume.hssp import _solve_hssp
from optuna.distributions import FloatDistribution
from optuna.samplers._tpe.sampler import _get_reference_point
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.sqlite import IN_MEMORY
from sweeps.optuna_compat import tpe
from sweeps.search.suggest import Suggester
from sweeps.spec.spec import SweepSpec
from sweeps.statistics.fronts import spread
from tests.bench.table import Goal, Result, alone, paired, size

_Floats = npt.NDArray[np.float64]
_PARAMETERS = (
    *("train.optimizer.lr", "train.clip.max_norm", "train.schedule.warmup"),
    *("train.schedule.final", "train.optimizer.weight_decay", "train.optimizer.momentum"),
)
_SWEEPS = {
    "1 metric, 2 parameters": (1, 2),
    "1 metric, 6 parameters": (1, 6),
    "2 metrics, 2 parameters": (2, 2),
    "2 metrics, 6 parameters": (2, 6),
    "2 metrics that agree, 2 parameters": (2, 2),
    "3 metrics, 2 parameters": (3, 2),
    "3 metrics, 6 parameters": (3, 6),
    "4 metrics, 2 parameters": (4, 2),
}
_IN_A_ROW = 15


def costs(repeats: int) -> list[Result]:
    """CPU time of a suggestion after each end of a trial, the mean of some in a row."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trials = size(10_000, 60)
    results = []
    for name, (metrics, parameters) in _SWEEPS.items():
        apart = 0.05 if "agree" in name else 1.0
        taken = [_cost(metrics, parameters, trials, apart, seed) for seed in range(repeats)]
        row = f"a suggestion at {trials:,} trials, {name}"
        results.append(alone(row, taken, "ms", Goal("ours", 40)))
    return results


def fronts(repeats: int) -> list[Result]:
    """The choice among a front of three metrics, against Optuna's."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    results = []
    for count in (size(500, 60), size(1000, 80)):
        found = [_chosen(_sphere(count, seed), count // 10) for seed in range(repeats)]
        for index, (what, unit) in enumerate((("time", "ms"), ("volume", "volume"))):
            ours, peer = ([one[side][index] for one in found] for side in (0, 1))
            row = f"{what} of the best tenth of a front of {count:,} trials / Optuna's"
            results.append(paired(row, ours, peer, unit))
    evaluations = size(400, 30)
    for name, problem in {"DTLZ2": dtlz2, "its convex form": convex, "DTLZ7": dtlz7}.items():
        ours, peer = (
            [_searched(problem, choose, evaluations, seed) for seed in range(repeats)]
            for choose in (spread, _greedy)
        )
        row = f"volume that {evaluations} trials dominate, {name} / Optuna's choice"
        results.append(paired(row, ours, peer, "volume"))
    return results


class _History:
    """A ledger in memory that grows by complete trials with random values."""

    def __init__(self, spec: SweepSpec, apart: float, seed: int) -> None:
        self.ledger = Ledger.create(IN_MEMORY, mode=spec.modes, sweep_id="bench")
        self._space = {key: one.to_optuna() for key, one in spec.search_space().ordered()}
        self._apart, self._draw = apart, np.random.default_rng(seed)

    def random_point(self) -> dict[str, float]:
        return {key: float(self._draw.uniform(0.01, 0.9)) for key in self._space}

    def add(self, point: dict[str, Any]) -> None:
        """Add a complete trial; with metrics that are far apart, half of them are on a front."""
        values = self._apart * _sphere(1, self._draw, len(self.ledger.directions))[0]
        values = (
            values * (1 + self._draw.random() ** 3 / 2) + (1 - self._apart) * self._draw.random()
        )
        number = self.ledger.add(Suggestion(point, self._space)).number
        value, *others = values.tolist()
        self.ledger.report(number, epoch=1, step=1, value=value, others=others)
        self.ledger.finish(number, "complete")


def _cost(metrics: int, parameters: int, trials: int, apart: float, seed: int) -> float:
    spec = SweepSpec.model_validate(
        {
            "name": "large",
            "task": "digits",
            "metric": [f"val/{index}" for index in range(metrics)] if metrics > 1 else "val/loss",
            "mode": ["min"] * metrics if metrics > 1 else "min",
            "trials": 2 * trials,
            "space": {key: {"uniform": [0.01, 0.9]} for key in _PARAMETERS[:parameters]},
            "search": {"sampler": "tpe", "try_first": []},
        }
    )
    history = _History(spec, apart, seed)
    for _ in range(trials):
        history.add(history.random_point())
    suggester, taken = Suggester(spec, history.ledger), []
    for number in range(trials, trials + 1 + _IN_A_ROW):
        started = time.process_time()
        suggestion = suggester.propose(number)
        taken.append(1e3 * (time.process_time() - started))
        history.add(dict(suggestion.params))
    return statistics.mean(taken[1:])  # the first one reads all trials


def _sphere(count: int, seed: Any, metrics: int = 3) -> _Floats:
    found: _Floats = np.abs(np.random.default_rng(seed).normal(size=(count, metrics)))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return found


def _greedy(front: _Floats, number: int) -> Any:
    return _solve_hssp(front, np.arange(len(front)), number, _get_reference_point(front))


def _chosen(front: _Floats, number: int) -> list[tuple[float, float]]:
    """Return time and volume of our choice and of Optuna's."""
    found = []
    for choose in (spread, _greedy):
        started = time.process_time()
        chosen = choose(front, number)
        seconds = time.process_time() - started
        found.append((1e3 * seconds, compute_hypervolume(front[chosen], np.full(3, 1.1))))
    return found


def _searched(
    problem: Callable[[_Floats], list[float]], choose: Any, evaluations: int, seed: int
) -> float:
    """Return the volume that the trials of a search dominate."""
    space: dict[str, Any] = {f"x{index}": FloatDistribution(0, 1) for index in range(6)}
    sampler, table = tpe.ArrayTPESampler(seed=seed), tpe.TrialTable(space, 3)
    trials: list[FrozenTrial] = []
    with mock.patch.object(tpe, "spread", choose):
        for number in range(evaluations):
            study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)
            study.add_trials(sampler.learn_from(trials, study, table))
            params = study.ask(space).params
            values = problem(np.array(list(params.values())))
            trials.append(create_trial(params=params, distributions=space, values=values))
            trials[-1].number = number
    losses = table.losses(table.places(TrialState.COMPLETE), [StudyDirection.MINIMIZE] * 3)
    worst = np.array([1.1, 1.1, 25.0]) if problem is dtlz7 else np.full(3, 2.5)
    return compute_hypervolume(losses[(losses <= worst).all(axis=1)], worst)


def dtlz2(x: _Floats) -> list[float]:
    """DTLZ2 of Deb et al. (2005), three losses: an eighth of a sphere is best."""
    angles, radius = x[:2] * np.pi / 2, 1 + np.square(x[2:] - 0.5).sum()
    first, second = np.cos(angles), np.sin(angles)
    return [float(radius * one) for one in (first[0] * first[1], first[0] * second[1], second[0])]


def convex(x: _Floats) -> list[float]:
    """DTLZ2 with a front that is bent the other way (Deb and Jain, 2014)."""
    first, second, third = dtlz2(x)
    return [first**4, second**4, third**2]


def dtlz7(x: _Floats) -> list[float]:
    """DTLZ7 of Deb et al. (2005), three losses: four separate pieces are best."""
    tail = 2 + 9 * x[2:].mean()
    height = 3 - sum(one / tail * (1 + np.sin(3 * np.pi * one)) for one in x[:2])
    return [float(x[0]), float(x[1]), float(tail * height)]
