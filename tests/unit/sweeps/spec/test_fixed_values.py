"""Whatever may be searched has a value where it is not: in constraints, and in the first trial."""

from __future__ import annotations

from typing import Any

import pytest

from sweeps.spec.own_values import resolve_search
from sweeps.spec.search_space import fixed_values, searchable_fields
from sweeps.spec.searched_workers import WORKERS
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.spec.yaml_scalars import write_flow

SPEC = """
name: fixed
task: {{name: digits, hidden: 32}}
metric: val/loss
mode: min
trials: 1
space: {space}
search: {{constraints: {constraints}}}
{more}
"""
WRITTEN = {
    "resources: {workers: 2}": (WORKERS, 2),
    "train: {ema: {decay: 0.9}}": ("train.ema.decay", 0.9),
    "train: {optimizer: {name: 'own:Make', arguments: {rate: 3}}}": (
        "train.optimizer.arguments.rate",
        3,
    ),
    "train: {schedule: {name: 'own:make', arguments: {start: 5}}}": (
        "train.schedule.arguments.start",
        5,
    ),
    "": ("task.hidden", 32),
}


def _spec(space: str = "{}", constraint: str | None = None, more: str = "") -> SweepSpec:
    constraints = write_flow([] if constraint is None else [constraint])
    return parse_spec(SPEC.format(space=space, constraints=constraints, more=more), "s.yaml")


def _fixed(spec: SweepSpec) -> dict[str, Any]:
    return fixed_values(spec.train, spec.task, spec.resources)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_no_searchable_field_lacks_its_value() -> None:
    lacking = searchable_fields().keys() - _fixed(_spec()).keys()
    assert lacking == {"train.optimizer.arguments", "train.schedule.arguments"}  # each is searched


@pytest.mark.parametrize(
    ("key", "value", "more"),
    [
        *((key, value, "") for key, value in _fixed(_spec()).items() if _is_number(value)),
        *((key, value, more) for more, (key, value) in WRITTEN.items()),
    ],
)
def test_constraint_may_name_each_fixed_number(key: str, value: float, more: str) -> None:
    space = _spec("{task.width: {int: [1, 4]}}", f"{key} == {value}", more).search_space()
    assert space.fixed == {key: value}
    assert space.allows({"task.width": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key, value in _fixed(_spec()).items()
        if key in searchable_fields() and value is not None and not isinstance(value, list)
    ],
)
def test_first_trial_has_each_value_that_the_file_leaves_out(key: str, value: object) -> None:
    more = "resources: {workers: 2}" if key == "train.sharding" else ""
    space = write_flow({key: {"choice": [value]}})
    found = resolve_search(_spec(space, more=more), {})
    assert (found.spec.search.try_first, found.cautions) == ([{key: value}], [])
