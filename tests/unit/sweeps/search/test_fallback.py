"""When GP gives way to a random point."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.optuna_compat.tpe import ArrayTPESampler
from sweeps.search.samplers import NotingGPSampler, Samplers
from sweeps.search.suggest import is_known, tells_nothing
from sweeps.spec.spec import parse_spec
from tests.unit.sweeps.search.trial_history import search

SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 60
budget: {epochs: 1}
space:
  task.x: {uniform: [0, 10]}
  task.y: {loguniform: [0.001, 1]}
search: {sampler: gp, startup_trials: 5}
early_stopping: {scheduler: none}
"""


def _trial(*values: float, **params: float) -> FrozenTrial:
    return create_trial(
        state=TrialState.COMPLETE if values else TrialState.RUNNING,
        values=values or None,
        params={f"task.{key}": value for key, value in params.items()},
        distributions={f"task.{key}": FloatDistribution(0, 10) for key in params},
    )


def test_equal_values_tell_nothing() -> None:
    assert tells_nothing([_trial(0.5), _trial(0.5), _trial()])
    assert tells_nothing([_trial(0.5, 1.0), _trial(0.5, 1.0)])
    assert not tells_nothing([_trial(0.5), _trial(0.4)])
    assert not tells_nothing([_trial(0.5, 1.0), _trial(0.5, 2.0)])
    assert not tells_nothing([_trial(0.5), _trial()]), "a single one is no reason to give up"


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ({"x": 5.05, "y": 0.101}, True),
        ({"x": 5.2, "y": 0.101}, False),  # a fiftieth of the range away
        ({"x": 5.05, "y": 0.12}, False),  # on a logarithmic scale
    ],
)
def test_neighbour_of_a_trial_is_known(point, expected) -> None:
    space = parse_spec(SPEC, "s.yaml").search_space()
    shown = [_trial(0.1, x=1.0, y=0.5), _trial(x=5.0, y=0.1), _trial(0.2)]
    named = {f"task.{key}": value for key, value in point.items()}
    assert is_known(named, shown, space) is expected


def test_gp_spreads_its_points_on_a_flat_function() -> None:
    drawn = search(parse_spec(SPEC, "s.yaml"), 30, lambda _: 0.5)
    assert _num_apart(drawn) > 20


def test_gp_leaves_a_wrong_optimum_now_and_then() -> None:
    """It is sure of its optimum at once, and still looks elsewhere."""
    drawn = search(parse_spec(SPEC, "s.yaml"), 40, lambda params: (params["task.x"] - 3) ** 2)
    late = [abs(params["task.x"] - 3) for params in drawn[20:]]
    assert sum(apart > 1 for apart in late) >= 4, late
    assert sum(apart < 0.5 for apart in late) >= 5, late


def test_every_second_suggestion_of_gp_is_one_of_tpe() -> None:
    samplers = Samplers(parse_spec(SPEC, "s.yaml"))
    kinds = [type(samplers.of(number)) for number in range(6)]
    assert kinds == [NotingGPSampler, ArrayTPESampler] * 3
    arguments = SPEC.replace("search: {", "search: {arguments: {deterministic_objective: true}, ")
    assert isinstance(Samplers(parse_spec(arguments, "s.yaml")).of(1), ArrayTPESampler)


def _num_apart(points: list[dict[str, Any]]) -> int:
    kept: list[float] = []
    for point in points:
        if all(abs(point["task.x"] - other) > 0.05 for other in kept):
            kept.append(point["task.x"])
    return len(kept)
