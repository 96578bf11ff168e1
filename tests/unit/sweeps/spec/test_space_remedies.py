"""Stepped integers, powers, lists and mappings as options; and the remedies of errors."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sweeps.errors import SpecError, UserError
from sweeps.spec.space import Choice, Int, Powers
from sweeps.spec.space_parser import parse_distribution
from sweeps.spec.spec import parse_spec
from sweeps.spec.yaml_reader import parse
from sweeps.spec.yaml_scalars import write_flow


def _read(text: str) -> Any:
    return parse(f"a: {text}", "s.yaml", {}).data["a"]


@pytest.mark.parametrize("text", ["{int: [16, 64], step: 16}", "{int: [16, 64, 16]}"])
def test_a_stepped_integer(text: str) -> None:
    found = parse_distribution(_read(text))
    assert found == Int(16, 64, 16)
    assert str(found) == "{int: [16, 64], step: 16}"
    assert parse_distribution(_read(str(found))) == found
    assert list(found.values() or ()) == [16, 32, 48, 64]
    assert {found.at(share / 100) for share in range(100)} == {16, 32, 48, 64}
    assert found.contains(48.0)
    assert not found.contains(40)
    assert not found.contains(80)
    assert [found.nearest(x) for x in (0, 25, 41, 99)] == [16, 32, 48, 64]
    assert found.to_optuna().step == 16  # type: ignore[attr-defined]
    assert [value for _, value in found.boundary_values()] == [16, 64, 32, 48]


def test_an_integer_without_a_step_is_recorded_as_ever() -> None:
    assert Int(1, 8).to_data() == {"int": [1, 8]}
    assert parse_distribution({"int": [1, 8], "step": 1}).to_data() == {"int": [1, 8]}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{powers: [16, 256, 2]}", [16, 32, 64, 128, 256]),
        ("{powers: [0.001, 1.0, 10]}", [0.001, 0.01, 0.1, 1.0]),
        ("{powers: [1, 100, 10]}", [1, 10, 100]),
    ],
)
def test_powers(text: str, values: list[float]) -> None:
    found = parse_distribution(_read(text))
    assert isinstance(found, Powers)
    assert list(found.options) == values
    assert [type(one) for one in found.options] == [type(one) for one in values]
    assert parse_distribution(_read(str(found))) == found


def test_lists_and_mappings_are_options() -> None:
    options = [[64, 32], [128], None, {"name": "adam", "betas": [0.9, 0.99]}, "[64]"]
    found = parse_distribution({"choice": options})
    assert isinstance(found, Choice)
    assert found.to_data() == {"choice": options}
    assert found.options[0] == "[64, 32]"
    assert [found.configured(one) for one in found.options] == options
    assert found.normalize([64, 32]) == "[64, 32]"
    assert all(map(found.contains, options))
    assert parse_distribution(_read(str(found))) == found
    found.to_optuna()  # which warns of anything but single values


@pytest.mark.parametrize("options", [[[64], "[64]"], [[1], [1]], [[float("nan")], 1], [{1: 2}, 3]])
def test_ambiguous_options_are_refused(options: list[Any]) -> None:
    with pytest.raises(UserError):
        parse_distribution({"choice": options})


SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 4
budget: {epochs: 2}
space:
"""


def _spec(space: str) -> Any:
    return parse_spec(SPEC + space, "s.yaml")


def test_list_is_checked_by_its_field_and_set_in_a_trial() -> None:
    space = "  train.optimizer.betas: {choice: [[0.9, 0.99], [0.8, 0.9]]}\n"
    space += "  train.optimizer.name: {choice: [adam]}\n"
    spec = _spec(space)
    config = spec.trial_config(0, spec.example_params())
    assert list(config.train.optimizer.betas) == [0.9, 0.99]
    with pytest.raises(SpecError, match="betas"):
        _spec(space.replace("[0.8, 0.9]", "[0.8]"))


@pytest.mark.parametrize(
    "wrong",
    [
        "{int: [16, 60], step: 16}",
        "{int: [16, 20], step: 16}",
        "{int: [16, 64, 0]}",
        "{int: [64, 16]}",
        "{quniform: [16, 60, 16]}",
        "{powers: [16, 200, 2]}",
        "{powers: [16, 17, 2]}",
        "{logint: [16, 256], step: 16}",
        "{loguniform: [16, 256], step: 2}",
        "{logint: [16, 256, 2]}",
        "{uniform: [16, 64], step: 16}",
    ],
)
def test_the_remedy_of_a_range_can_be_followed(wrong: str) -> None:
    data = _read(wrong)
    with pytest.raises(UserError) as refused:
        parse_distribution(data)
    remedy = str(refused.value).rpartition("; ")[2]
    found = _followed(remedy, data)
    assert found is not None, remedy
    parse_distribution(found)


def _followed(remedy: str, data: dict[str, Any]) -> Any:
    """The distribution that a reader writes who is told so."""
    (name,) = data.keys() - {"step"}
    if example := re.search(r"such as (powers: \[.*\])", remedy):
        return _read(f"{{{example[1]}}}")
    if numbers := re.search(r"write (\[.*\])(?:, step: (\d+))?", remedy):
        step = f", step: {numbers[2]}" if numbers[2] else ""
        return _read(f"{{{name}: {numbers[1]}{step}}}")
    if step := re.search(r"write a step of (\d+) or less", remedy):
        return _read(f"{{{name}: {write_flow(data[name])}, step: {step[1]}}}")
    if "write 16" in remedy:
        return {name: [*data[name][:2]], "step": 16}
    if "quniform: [low, high, step]" in remedy:
        return {"quniform": [*data[name], data["step"]]}
    return None


def test_fraction_for_an_integer_names_alternatives() -> None:
    with pytest.raises(SpecError) as refused:
        _spec("  train.batch_size: {quniform: [32, 256, 8]}\n")
    remedy = str(refused.value).rpartition("; write ")[2]
    assert remedy == "{int: [32, 256], step: 8}"
    _spec(f"  train.batch_size: {remedy}\n")
