"""No point is trained twice: the sampler is asked anew, then the nearest unused point is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.ledger.ledger import Ledger
from sweeps.search.suggest import Suggester, TriedPoints
from sweeps.spec.search_space import SearchSpace
from sweeps.spec.space_parser import parse_distribution
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.slices import sliced

SPEC = """
name: few
task: digits
metric: val/loss
mode: min
trials: {trials}
budget: {{epochs: 2}}
space: {space}
search: {search}
"""
SMALL = {
    "powers and steps": (
        "{train.accumulation: {powers: [1, 4, 2]}, "
        "train.schedule.warmup: {quniform: [0, 0.2, 0.1]}}",
        9,
    ),
    "whole numbers": ("{train.schedule.step_epochs: {logint: [1, 5]}}", 5),
    "a condition": (
        "{train.optimizer.name: {choice: [sgd, adamw]}, "
        "train.optimizer.nesterov: {choice: [true, false], when: {train.optimizer.name: sgd}}}",
        3,
    ),
}
SAMPLERS = ["tpe", "random", "qmc", "grid", "nsgaii", "cmaes", "gp"]


def _spec(space: str, search: str = "{}", trials: int = 40) -> SweepSpec:
    return parse_spec(SPEC.format(space=space, search=search, trials=trials), "few.yaml")


def _suggested(tmp_path: Path, spec: SweepSpec, *, value: float = 1.0) -> list[dict[str, Any]]:
    """Return the points of all trials of a sweep in which each trial has the same value."""
    ledger = Ledger.create(tmp_path / "ledger.db", mode="min", sweep_id="s")
    suggester = Suggester(spec, ledger)
    for number in range(spec.num_trials):
        ledger.add(suggester.propose(number))
        ledger.report(number, epoch=2, step=2, value=value)
        ledger.finish(number, "complete")
    return [trial.params for trial in ledger.trials()]


@pytest.mark.parametrize("sampler", sliced(SAMPLERS, ("tpe", "cmaes", "grid").__contains__))
@pytest.mark.parametrize("space", SMALL)
def test_each_point_of_a_small_space_is_tried_once(
    tmp_path: Path, space: str, sampler: str
) -> None:
    text, size = SMALL[space]
    if sampler == "grid" and "logint" in text:
        text = text.replace("logint", "int")
    spec = _spec(text, f"{{sampler: {sampler}, startup_trials: 2}}")
    assert spec.num_trials == size
    found = _suggested(tmp_path, spec)
    assert len({tuple(sorted(point.items())) for point in found}) == size


def test_gp_tries_new_points_on_a_flat_function(tmp_path: Path) -> None:
    space = "{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}"
    spec = _spec(space, "{sampler: gp, startup_trials: 3}", trials=16)
    found = [point["train.optimizer.lr"] for point in _suggested(tmp_path, spec)]
    distribution = spec.space["train.optimizer.lr"]
    assert len({distribution.identity(value) for value in found}) == 16


def test_resumed_search_repeats_no_point(tmp_path: Path) -> None:
    spec = _spec("{train.accumulation: {choice: [1, 2, 4, 8]}}", "{sampler: random}")
    ledger = Ledger.create(tmp_path / "ledger.db", mode="min", sweep_id="s")
    for number in range(spec.num_trials):  # a new driver each time, with trials that still run
        ledger.add(Suggester(spec, ledger).propose(number))
    assert sorted(t.params["train.accumulation"] for t in ledger.trials()) == [1, 2, 4, 8]


def test_points_to_try_first_may_repeat(tmp_path: Path) -> None:
    point = "{train.accumulation: 2}"
    spec = _spec("{train.accumulation: {choice: [1, 2, 4]}}", f"{{try_first: [{point}, {point}]}}")
    found = [one["train.accumulation"] for one in _suggested(tmp_path, spec)]
    assert found[:2] == [2, 2]
    assert len(found) == 3


def test_trials_of_an_empty_space_differ_in_their_seeds(tmp_path: Path) -> None:
    spec = _spec("{}", trials=5)
    assert _suggested(tmp_path, spec) == [{}] * 5


def test_population_may_have_the_same_point_twice() -> None:
    text = SPEC.format(
        space="{train.optimizer.weight_decay: {choice: [0.0, 0.1]}}", search="{}", trials=6
    )
    spec = parse_spec(f"{text}early_stopping: {{scheduler: pbt, interval_epochs: 1}}\n", "p.yaml")
    assert spec.num_trials == 6


def test_nearest_unused_point_is_near() -> None:
    space = SearchSpace(
        {
            "n": parse_distribution({"int": [1, 9]}),
            "rate": parse_distribution({"choice": [0.1, 0.2]}),
        }
    )
    tried = TriedPoints(space, lambda trial: trial.params)
    point = {"n": 4, "rate": 0.1}
    nearest = tried.nearest_unused(point, {}, seed=0)
    assert nearest == point
    assert tried.nearest_unused(point, {"n": 7}, seed=0) == {"n": 7, "rate": 0.1}
