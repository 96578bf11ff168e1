"""Samplers go on by what they have learned where constraints forbid a part of the space.

All known points are allowed ones. So what is forbidden looks untried, and samplers prefer it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any

import pytest
from optuna.trial import FrozenTrial

from sweeps.ledger.ledger import Ledger
from sweeps.search.suggest import Suggester
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.slices import sliced
from tests.unit.sweeps.search.trial_history import empty_ledger, end

X, Y = "task.x", "task.y"
STARTUP = 10
SPEC = """
name: s
task: digits
metric: {metric}
mode: {mode}
trials: 99
seed: {seed}
budget: {{epochs: 9}}
space: {space}
search: {{sampler: {sampler}, startup_trials: 10, try_first: [], arguments: {arguments},
  constraints: [{constraint}]}}
early_stopping: {{scheduler: none}}
"""
PLAIN = "{task.x: {uniform: [0, 1]}, task.y: {uniform: [0, 1]}}"
CONDITIONAL = (
    "{task.c: {choice: [1, 2]}, task.x: {uniform: [0, 1]}, "
    "task.y: {uniform: [0, 1], when: {task.c: 1}}, task.z: {uniform: [0, 1], when: {task.c: 2}}}"
)
STEPS = "{task.x: {quniform: [0, 1, 0.01]}, task.y: {logint: [1, 1000]}, task.z: {int: [0, 9]}}"
HALF, FIFTH, CORNER = f"{X} <= 0.5", f"{X} <= 0.2", f"{X} + {Y} <= 0.5"


def spec_of(
    sampler: str,
    constraint: str,
    *,
    seed: int = 0,
    space: str = PLAIN,
    arguments: str = "{}",
    metrics: int = 1,
) -> SweepSpec:
    text = SPEC.format(
        metric="val/loss" if metrics == 1 else "[val/loss, cost]",
        mode="min" if metrics == 1 else "[min, min]",
        seed=seed, space=space, sampler=sampler, arguments=arguments,
        constraint=f'"{constraint}"' if constraint else "",
    )  # fmt: skip
    return parse_spec(text, "s.yaml")


def loss(params: dict[str, Any]) -> float:
    y = params.get(Y, params.get("task.z", 0.0))
    return float(25 * (params[X] - 0.05) ** 2 + (y - 0.3) ** 2)


class Search:
    """A search, one trial after the other.

    Args:
        spec: The sweep.
        count: The number of trials.
        anew: Whether each suggestion is that of a new suggester, as after a resume.
    """

    def __init__(self, spec: SweepSpec, count: int, *, anew: bool = False) -> None:
        self.num_random = 0
        """How many points after the startup trials were drawn at random."""
        history = empty_ledger(spec)
        suggester = self._suggester(spec, history)
        for number in range(count):
            suggestion = suggester.propose(number)
            assert spec.search_space().allows(suggestion.params)
            values = [loss(suggestion.params), 1 - suggestion.params[X]]
            end(history, suggestion, values[: len(spec.metrics)])
            suggester = self._suggester(spec, history) if anew else suggester
        self.trials: list[FrozenTrial] = history.frozen_trials()
        self.best = min(loss(trial.params) for trial in self.trials)

    def _suggester(self, spec: SweepSpec, history: Ledger) -> Suggester:
        suggester = Suggester(spec, history)
        another = suggester._another

        def counted(
            number: int, params: dict[str, Any], known: Mapping[str, Any], is_allowed: bool
        ) -> dict[str, Any]:
            self.num_random += number >= STARTUP and not is_allowed
            return another(number, params, known, is_allowed)

        suggester._another = counted  # type: ignore[method-assign]
        return suggester


@cache
def searches(sampler: str, constraint: str, seeds: int, count: int) -> Sequence[Search]:
    return [Search(spec_of(sampler, constraint, seed=seed), count) for seed in range(seeds)]


@pytest.mark.parametrize("constraint", sliced([HALF, FIFTH, CORNER], CORNER.__eq__))
@pytest.mark.parametrize(
    ("sampler", "seeds", "count", "most"),
    [("tpe", 5, 40, 0.0), ("nsgaii", 5, 80, 0.05), ("cmaes", 5, 80, 0.2), ("gp", 2, 14, 0.0)],
)
def test_few_points_are_random_and_the_best_is_better(
    sampler: str, seeds: int, count: int, most: float, constraint: str
) -> None:
    found = searches(sampler, constraint, seeds, count)
    at_random = searches("random", constraint, seeds, count)
    assert sum(one.num_random for one in found) <= most * seeds * (count - STARTUP)
    assert median(one.best for one in found) < median(one.best for one in at_random)


OTHERS = {
    "several metrics": {"metrics": 2},
    "parameter by parameter": {"arguments": "{multivariate: false}"},
    "conditional": {"space": CONDITIONAL},
    "conditional, parameter by parameter": {
        "space": CONDITIONAL, "arguments": "{multivariate: false}",
    },
    "steps": {"space": STEPS, "constraint": f"{X} * {Y} <= 20"},
    "three by steps": {
        "space": STEPS, "constraint": f"{X} * {Y} + task.z <= 9",
        "arguments": "{multivariate: false}",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS.values(), ids=list(OTHERS))
def test_tpe_draws_no_random_points_in_other_spaces(case: dict[str, Any]) -> None:
    found = [Search(spec_of("tpe", **{"constraint": CORNER} | case, seed=k), 40) for k in range(3)]
    assert sum(one.num_random for one in found) == 0


@pytest.mark.parametrize("sampler", ["tpe", "nsgaii", "cmaes", "gp"])
def test_suggestions_depend_on_the_trials_alone(sampler: str) -> None:
    count = 16 if sampler == "gp" else 30
    cases = [{}] if sampler in ("cmaes", "gp") else [{}, {"metrics": 2}, {"space": CONDITIONAL}]
    for case in cases:
        spec = spec_of(sampler, CORNER, **case)
        found = [Search(spec, count, anew=anew).trials for anew in (False, True)]
        assert [one.params for one in found[0]] == [one.params for one in found[1]]


def test_a_value_is_allowed_if_those_of_some_point_go_with_it() -> None:
    space = spec_of("tpe", CORNER, space=CONDITIONAL).search_space()
    points = [{"task.c": 1, X: 0.1, Y: 0.2}, {"task.c": 2, X: 0.4, "task.z": 0.9}]
    may_be = space.may_allow(points)
    assert may_be({"task.c": 1, X: 0.3})
    assert not may_be({"task.c": 1, X: 0.4})
    assert not may_be({"task.c": 1, X: 0.4, Y: 0.2})
    assert may_be({"task.c": 2, X: 0.4}), "there is no y"
    assert may_be({"task.c": 2, X: 0.4, Y: 0.9}), "nor is there with a value"
    assert space.may_allow()({"task.c": 1, X: 0.4})
    assert space.may_allow(points[1:])({"task.c": 1, X: 0.4}), "no point tells of y"


GENERATION = "NSGAIISampler:generation"


def test_nsgaii_sees_points_in_place_of_its_own() -> None:
    trials = Search(spec_of("nsgaii", f"{X} + {Y} <= 0.3"), 40).trials
    assert all(GENERATION in trial.system_attrs for trial in trials)


@pytest.mark.parametrize("before", ["nsgaii", "tpe", "random"])
def test_nsgaii_sees_earlier_trials_of_another_space_or_sampler(before: str) -> None:
    spec = spec_of(before, "")
    history = empty_ledger(spec)
    suggester = Suggester(spec, history)
    for number in range(30):
        suggestion = suggester.propose(number)
        end(history, suggestion, loss(suggestion.params))
    edited = spec_of("nsgaii", "", space=PLAIN.replace("[0, 1]}}", "[0, 0.9]}}"))
    found = [Suggester(edited, history).propose(30 + more) for more in range(3)]
    assert [one.system_attrs[GENERATION] for one in found] == [1, 1, 1]
    good = sorted(loss(trial.params) for trial in history.frozen_trials())
    assert median(loss(one.params) for one in found) < median(good), "children of the best"
