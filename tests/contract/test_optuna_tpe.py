"""TPE on arrays still does what Optuna's TPE does, and what it stands on still is there.

The private parts of Optuna are those of `sweeps/optuna_compat/tpe.py`.
"""

from __future__ import annotations

import inspect
import random
from typing import Any

import numpy as np
import optuna
import pytest
from optuna._hypervolume.hssp import _solve_hssp
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import TPESampler
from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator
from optuna.samplers._tpe.sampler import _get_reference_point
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.optuna_compat.tpe import ArrayTPESampler, TrialTable, _log_pdf, _of_front

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

FLOATS: dict[str, BaseDistribution] = {
    "x": FloatDistribution(0, 1),
    "lr": FloatDistribution(1e-4, 1, log=True),
}
CHOICES: dict[str, BaseDistribution] = {
    "c": CategoricalDistribution(("a", "b", "c")),
    "d": CategoricalDistribution((1, 2)),
}
STEPS: dict[str, BaseDistribution] = {
    "k": IntDistribution(1, 300),
    "log": IntDistribution(1, 300, log=True),
    "q": FloatDistribution(0, 1, step=0.1),
}
EIGHT: dict[str, BaseDistribution] = {f"x{index}": FloatDistribution(0, 1) for index in range(8)}
SPACES = {
    "floats": FLOATS,
    "choices": CHOICES,
    "floats, choices": FLOATS | CHOICES,
    "all": FLOATS | CHOICES | STEPS,
    "eight": EIGHT,
    "nine and choices": EIGHT | FLOATS | CHOICES,
}


def points(space: dict[str, BaseDistribution], count: int) -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [study.ask(space).params for _ in range(count)]


def made(
    count: int, space: dict[str, BaseDistribution], metrics: int, *, values: int, pruned: int
) -> list[FrozenTrial]:
    """Return trials in all states, some of them without some of the parameters."""
    draw, found = random.Random(0), []
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL]
    whole = space.keys() - STEPS.keys()
    for number, params in enumerate(points(space, count)):
        if draw.random() < 0.2:
            params = {key: value for key, value in params.items() if key in whole}
        state = draw.choices(states, [6, pruned, 1, 1])[0]
        reports = range(1, 1 + draw.randint(0, 3)) if metrics == 1 else ()
        trial = create_trial(
            state=state,
            values=[draw.randrange(values) / 7 for _ in range(metrics)]
            if state == TrialState.COMPLETE
            else None,
            params=params,
            distributions={key: space[key] for key in params},
            intermediate_values={
                epoch: draw.choice([0.5, draw.random(), float("nan")]) for epoch in reports
            },
        )
        trial.number = number
        found.append(trial)
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_sample", ["study", "trial", "search_space"]),
        ("_get_internal_repr", ["trials", "search_space", "study"]),
        ("_compute_acquisition_func", ["samples", "mpe_below", "mpe_above"]),
        ("_build_parzen_estimator", ["study", "search_space", "trials", "handle_below"]),
        ("_get_params", ["trial", "study"]),
    ],
)
def test_method_that_is_replaced_or_called(name: str, expected: list[str]) -> None:
    assert list(inspect.signature(getattr(TPESampler, name)).parameters) == ["self", *expected]
    assert list(inspect.signature(getattr(ArrayTPESampler, name)).parameters)[1:] == expected


@pytest.mark.parametrize("count", [0, 1, 500])
@pytest.mark.parametrize("space", SPACES.values(), ids=list(SPACES))
def test_densities_are_those_of_optuna_bit_by_bit(count: int, space: Any) -> None:
    drawn = points(space, count)
    known = {
        key: np.array([one.to_internal_repr(params[key]) for params in drawn])
        for key, one in space.items()
    }
    estimator = _ParzenEstimator(known, space, TPESampler()._parzen_estimator_parameters)
    samples = estimator.sample(np.random.RandomState(0), 24)
    assert _log_pdf(estimator, samples).tolist() == estimator.log_pdf(samples).tolist()


def test_density_of_a_point_that_rounding_put_outside_the_space() -> None:
    space: dict[str, BaseDistribution] = {"x": FloatDistribution(0, 1)}
    estimator = _ParzenEstimator(
        {"x": np.array([0.5])}, space, TPESampler()._parzen_estimator_parameters
    )
    samples = {"x": np.array([0.5, np.nextafter(1, 2)])}
    found = _log_pdf(estimator, samples)
    assert found.tolist() == estimator.log_pdf(samples).tolist()
    assert found[1] == -np.inf


@pytest.mark.parametrize("arguments", [{}, {"group": True}, {"constant_liar": False}], ids=str)
@pytest.mark.parametrize("space", [FLOATS, FLOATS | CHOICES | STEPS], ids=["floats", "all"])
@pytest.mark.parametrize(
    "directions",
    [["minimize"], ["maximize"], ["minimize", "maximize"], ["minimize", "maximize", "minimize"]],
    ids=str,
)
@pytest.mark.parametrize(
    ("values", "pruned"), [(5, 3), (10**6, 3), (5, 200)], ids=["equal", "different", "pruned"]
)
def test_suggestions_are_those_of_optuna(
    directions: Any,
    space: Any,
    arguments: Any,
    values: int,
    pruned: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For numbers of trials around those at which Optuna's weights and choices change.

    With three metrics they are, as long as trials of a front are chosen as Optuna chooses them.
    """
    monkeypatch.setattr("sweeps.optuna_compat.tpe._MOST_METRICS", 3)
    if arguments.get("group") and len(directions) > 1:
        arguments = {**arguments, "multivariate": True}
    table = TrialTable(space, len(directions))
    trials = made(420, space, len(directions), values=values, pruned=pruned)
    for count in (12, 130, 420):
        asked = []
        for kind in (TPESampler, ArrayTPESampler):
            sampler = kind(seed=count, n_startup_trials=5, **arguments)
            study = optuna.create_study(directions=directions, sampler=sampler)
            given = trials[:count]
            if isinstance(sampler, ArrayTPESampler):
                given = sampler.learn_from(given, study, table)
                assert len(given) < count
            study.add_trials(given)
            asked.append(study.ask(space).params)
        assert asked[0] == asked[1]


@pytest.mark.parametrize("directions", [["minimize"], ["maximize", "minimize"]], ids=str)
@pytest.mark.parametrize("feasible", [0.0, 0.05, 0.6])
def test_constrained_suggestions_are_those_of_optuna(directions: Any, feasible: float) -> None:
    """Few feasible trials: TPE then also imitates the infeasible ones that miss least."""
    space, draw = FLOATS | CHOICES, random.Random(1)
    table = TrialTable(space, len(directions))
    trials = made(200, space, len(directions), values=10**6, pruned=3)
    for trial in trials:
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            margins = [draw.choice([0.0, -1.0]), -draw.random()]
            if draw.random() >= feasible:
                margins[1] = draw.choice([0.25, draw.random()])
            trial.system_attrs = {"constraints": margins}
    for count in (12, 60, 200):
        asked = []
        for kind in (TPESampler, ArrayTPESampler):
            sampler = kind(seed=count, n_startup_trials=5)
            study = optuna.create_study(directions=directions, sampler=sampler)
            given = trials[:count]
            if isinstance(sampler, ArrayTPESampler):
                given = sampler.learn_from(given, study, table)
            study.add_trials(given)
            asked.append(study.ask(space).params)
        assert asked[0] == asked[1]


@pytest.mark.parametrize("metrics", [2, 3, 4])
def test_trials_of_a_front_are_chosen_by_optuna_with_two_metrics_alone(metrics: int) -> None:
    front = np.abs(np.random.default_rng(0).normal(size=(100, metrics)))
    front /= np.linalg.norm(front, axis=1, keepdims=True)
    expected = _solve_hssp(front, np.arange(100), 20, _get_reference_point(front))
    assert (set(_of_front(front, 20)) == set(expected)) == (metrics == 2)
