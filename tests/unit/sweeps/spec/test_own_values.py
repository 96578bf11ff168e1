"""The first trial of a new sweep has the values that file and task have without a search."""

from __future__ import annotations

import pytest

from sweeps.spec.own_values import resolve_search, unwritten_values
from sweeps.spec.spec import SweepSpec, parse_spec

SPEC = """
name: own
task: {{name: digits, hidden: 48, shape: [3, 4]}}
metric: val/loss
mode: min
trials: 8
train: {{optimizer: {{name: sgd, lr: 0.02, momentum: 0.5}}}}
space: {space}
search: {search}
"""
RATE = "train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}"


def _spec(space: str, search: str = "{}") -> SweepSpec:
    return parse_spec(SPEC.format(space=space, search=search), "own.yaml")


@pytest.mark.parametrize(
    ("space", "point"),
    [
        (RATE, {"train.optimizer.lr": 0.02}),
        (
            f"{RATE}, task.hidden: {{int: [16, 64]}}, task.dropout: {{uniform: [0, 0.5]}}",
            {"train.optimizer.lr": 0.02, "task.hidden": 48, "task.dropout": 0.125},
        ),
        (
            "train.optimizer.name: {choice: [sgd, adamw]}, train.optimizer.momentum: "
            "{uniform: [0, 0.9], when: {train.optimizer.name: sgd}}, train.optimizer.eps: "
            "{loguniform: [1.0e-9, 1.0e-6], when: {train.optimizer.name: adamw}}",
            {"train.optimizer.name": "sgd", "train.optimizer.momentum": 0.5},
        ),
        (
            f"{RATE}, task.shape: {{choice: [[1, 2], [3, 4]]}}",
            {"train.optimizer.lr": 0.02, "task.shape": "[3, 4]"},
        ),
    ],
    ids=["written", "of the task", "conditional", "a list"],
)
def test_first_point_has_the_values_of_file_and_task(space: str, point: dict[str, object]) -> None:
    spec = _spec(f"{{{space}}}")
    resolved, cautions = resolve_search(spec, {"hidden": 32, "dropout": 0.125, "other": 1})
    assert (resolved.search.try_first, cautions) == ([point], [])
    assert "other" not in resolved.task.arguments  # only what is searched is written down
    again = parse_spec(resolved.to_yaml(), "sweep.yaml")
    assert resolve_search(again, {"dropout": 0.4}).spec == again  # a resume keeps the point


@pytest.mark.parametrize(
    ("space", "search", "named"),
    [
        ("{train.optimizer.lr: {uniform: [0.1, 0.2]}}", "{}", "train.optimizer.lr"),
        ("{task.unheard: {int: [1, 40]}}", "{}", "task.unheard"),
        (
            f"{{{RATE}, train.clip.max_norm: {{uniform: [0.001, 4]}}}}",
            "{sampler: random, constraints: [train.clip.max_norm < train.optimizer.lr]}",
            "search.constraints",
        ),
        (
            "{train.optimizer.lr: {uniform: [0.1, 0.2], prior: 0.11}}",
            "{try_first: [], constraints: [train.optimizer.lr > 0.15]}",
            "forbid the priors together, so",
        ),
        (
            "{train.optimizer.lr: {loguniform: [1.0e-5, 1.0]}}",
            "{try_first: [], priors: defaults, constraints: [train.optimizer.lr >= 0.3]}",
            "forbid the priors together, so",
        ),
        (
            "{train.optimizer.name: {choice: [sgd, adamw]}, "
            "train.optimizer.lr: {loguniform: [1.0e-4, 0.1]}}",
            "{try_first: [], priors: defaults, constraints: [train.optimizer.lr >= 0.005]}",
            "forbid the priors together with adamw, so",
        ),
        (
            "{task.x: {uniform: [0, 1]}, task.y: {uniform: [0, 1]}}",
            "{try_first: [], constraints: [task.x + task.y <= 0.2]}",
            "search.constraints allow 2.",
        ),
    ],
    ids=[
        "outside",
        "without a value",
        "constraint",
        "priors",
        "defaults",
        "defaults of one optimizer",
        "small part",
    ],
)
def test_why_no_trial_has_the_own_values_is_said(space: str, search: str, named: str) -> None:
    resolved, cautions = resolve_search(_spec(space, search), {})
    assert resolved.search.try_first == []
    assert len(cautions) == 1
    assert named in cautions[0]


@pytest.mark.parametrize("search", ["{try_first: []}", "{try_first: [{train.optimizer.lr: 0.1}]}"])
def test_points_of_the_user_stay(search: str) -> None:
    spec = _spec(f"{{{RATE}}}", search)
    assert resolve_search(spec, {}) == (spec, [])


def test_sweep_without_a_space_has_no_first_point() -> None:
    resolved, cautions = resolve_search(_spec("{}"), {})
    assert (resolved.search.try_first, cautions) == ([], [])


def test_space_with_too_few_points_is_said() -> None:
    spec = _spec("{train.accumulation: {choice: [1, 2, 4]}}", "{sampler: grid}")
    resolved, cautions = resolve_search(spec, {})
    assert (resolved.num_trials, resolved.trials) == (3, 8)
    assert ["3" in one for one in cautions] == [True]


@pytest.mark.parametrize("own_optimizer", [False, True])
def test_unwritten_values_are_in_neither_file_nor_space(own_optimizer: bool) -> None:
    text = (
        "name: s\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 2\n"
        "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}\n"
    )
    found = unwritten_values(parse_spec(text, "s.yaml"), own_optimizer=own_optimizer)
    wanted = {
        "train.optimizer.name": "adamw",
        "train.optimizer.weight_decay": 0.01,
        "train.batch_size": 64,
        "train.clip.max_norm": 1.0,
        "train.schedule.name": "cosine",
    }
    of_torch = {key: value for key, value in wanted.items() if key.count(".") == 1}
    of_torch["train.clip.max_norm"] = 1.0
    assert found == (of_torch if own_optimizer else wanted)
    written = "train: {batch_size: 64, clip: {max_norm: 1}, optimizer: {name: adamw}}\n"
    found = unwritten_values(parse_spec(text + written, "s.yaml"), own_optimizer=own_optimizer)
    left = {"train.optimizer.weight_decay": 0.01, "train.schedule.name": "cosine"}
    assert found == ({} if own_optimizer else left)
