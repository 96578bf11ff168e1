"""Optimizers and schedules of the user in a spec: names, arguments, and what a space may vary."""

from __future__ import annotations

import pytest

from sweeps.engine.task_check import TaskRefused, check_names, optimizer_variants
from sweeps.errors import SpecError
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.spec.trial_run import run_start
from tests.unit.sweeps.spec_errors import HEAD

OWN = (
    "train:\n  optimizer: {name: own:Signs, lr: 0.1, weight_decay: 0.2, arguments: {beta: 0.8}}\n"
)


def _parse(more: str, *overrides: str) -> SweepSpec:
    return parse_spec(HEAD + more, "s.yaml", overrides)


def test_spec_with_an_own_class_is_read_back_equal() -> None:
    spec = _parse(OWN)
    again = parse_spec(spec.to_yaml(), "sweep.yaml")
    assert again == spec
    assert "momentum" not in again.train.optimizer.model_dump()
    assert again.train.optimizer.model_fields_set == {"name", "lr", "weight_decay", "arguments"}
    assert again.trial_modules == ["own"]
    assert _parse("").trial_modules == []


def test_searched_argument_reaches_its_trial_and_its_record() -> None:
    spec = _parse(
        OWN
        + "space:\n"
        + "  train.optimizer.arguments.beta: {uniform: [0.5, 0.9]}\n"
        + "  train.schedule.arguments.low: {uniform: [0.0, 0.1]}\n"
    )
    params = {"train.optimizer.arguments.beta": 0.6, "train.schedule.arguments.low": 0.05}
    config = spec.trial_config(0, params)
    assert config.train.optimizer.arguments == {"beta": 0.6}
    assert config.train.schedule.arguments == {"low": 0.05}
    assert params.items() <= run_start(config, params).params.items()


def test_override_sets_one_argument() -> None:
    spec = _parse(OWN, "train.optimizer.arguments.flip=true", "train.schedule.arguments.low=0.1")
    assert spec.train.optimizer.arguments == {"beta": 0.8, "flip": True}
    assert spec.train.schedule.arguments == {"low": 0.1}


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("space: {train.optimizer.arguments: {uniform: [0, 1]}}\n", ".arguments"),
        ("space: {train.optimizer.arguments.lr: {uniform: [0, 1]}}\n", "arguments.lr"),
        ("space: {train.optimizer.arguments.a.b: {uniform: [0, 1]}}\n", "arguments.a.b"),
        ("space: {train.optimizer.argument.a: {uniform: [0, 1]}}\n", "argument.a"),
        ("train: {optimizer: {arguments: {lr: 1.0}}}\n", "train.optimizer.arguments"),
        ("train: {optimizer: {arguments: {params: 1}}}\n", "train.optimizer.arguments"),
        ("train: {optimizer: {arguments: {api_key: a}}}\n", "train.optimizer.arguments.api_key"),
        ("train: {schedule: {arguments: {low: .inf}}}\n", "train.schedule.arguments.low"),
        ("train: {optimizer: {arguments: 3}}\n", "train.optimizer.arguments"),
        ("train: {optimizer: {name: 'own:1'}}\n", "train.optimizer.name"),
        ("train: {optimizer: {name: ':Signs'}}\n", "train.optimizer.name"),
        ("train: {schedule: {name: wds}}\n", "train.schedule.name"),
        ("train: {schedule: {name: wsd, decay: 1.5}}\n", "train.schedule.decay"),
        ("train: {schedule: {name: wsd, decay: 0}}\n", "train.schedule.decay"),
        ("train: {schedule: {power: 0}}\n", "train.schedule.power"),
        ("train: {schedule: {cycles: 0}}\n", "train.schedule.cycles"),
    ],
)  # fmt: skip
def test_wrong_key_or_value_is_refused_in_its_place(more: str, key: str) -> None:
    with pytest.raises(SpecError) as refused:
        _parse(more)
    (problem,) = refused.value.problems
    assert problem.key.endswith(key)


def test_every_option_of_the_space_is_tried_before_a_sweep() -> None:
    spec = _parse(
        "space:\n"
        "  train.optimizer.name: {choice: [adamw, 'own:Signs']}\n"
        "  train.optimizer.lr: {loguniform: [0.001, 0.1]}\n"
        "  train.optimizer.arguments.beta:\n"
        "    {choice: [0.8, 0.9], when: {train.optimizer.name: 'own:Signs'}}\n"
        "  train.schedule.name: {choice: [cosine, 'own:low', wsd]}\n"
    )
    tried = [
        (one.train.optimizer.name, one.train.optimizer.arguments, one.train.schedule.name)
        for one in optimizer_variants(spec)
    ]
    assert [name for name, *_ in tried].count("own:Signs") == 3
    assert {name for *_, name in tried} == {"cosine", "own:low", "wsd"}
    assert [given["beta"] for _, given, _ in tried if "beta" in given] == [0.8, 0.8, 0.9]
    assert spec.trial_modules == ["own"]


def test_module_that_does_not_exist_is_refused_without_a_child() -> None:
    spec = _parse("train: {optimizer: {name: 'no_such_module:Signs', lr: 0.1}}\n")
    with pytest.raises(TaskRefused, match="no_such_module"):
        check_names(spec)
