"""A mutated spec is valid or refused in the documented form; a valid one survives writing."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.errors import SpecError
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.spec.yaml_reader import parse_value
from sweeps.spec.yaml_scalars import write_flow

VALID: dict[str, Any] = {
    "version": 1,
    "name": "digits",
    "task": {"name": "digits", "hidden": 64},
    "metric": "val/loss",
    "mode": "min",
    "trials": 24,
    "seed": 0,
    "concurrency": None,
    "budget": {"epochs": 10},
    "space": {
        "train.optimizer.lr": {"loguniform": [1e-4, 0.1]},
        "train.schedule.warmup": {"uniform": [0.0, 0.3]},
        "train.batch_size": {"choice": [32, 64]},
        "task.hidden": {"int": [16, 64], "step": 16, "prior": 32},
        "task.depth": {"choice": [1, 2], "when": {"train.batch_size": [32, 64]}},
    },
    "search": {
        "sampler": "tpe",
        "startup_trials": 8,
        "arguments": {"multivariate": True},
        "try_first": [{"task.hidden": 32, "train.batch_size": 64}],
        "constraints": ["train.batch_size + task.hidden <= 100", "task.depth < 3"],
        "warm_start": ["earlier"],
    },
    "early_stopping": {"scheduler": "asha", "grace_epochs": 1, "reduction": 3},
    "resources": {"cpu": 1, "gpu": "auto"},
    "train": {
        "batch_size": 64,
        "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.99]},
        "schedule": {"name": "cosine", "warmup": 0.1},
        "clip": {"max_norm": 1.0},
    },
    "checkpoint": {"every": "1 epoch", "keep": 2},
    "tracking": {"uri": None},
    "failures": {"max_retries": 2},
    "preemption": {"command": "test -e notice", "every": "2s"},
}
WORDS = [
    "lr",
    "learning_rte",
    "min",
    "",
    "on",
    "1e-4",
    "1,5",
    "auto",
    "${HOME}",
    "${X",
    "$${",
    "a: b",
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 12),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
PROBLEM = re.compile(r"(s\.yaml(:\d+:\d+)?|-s .*|trial \d+): (\S.*: )?\S.*")


def _paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, ...]] = [path] if path else []
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            inner += _paths(data[key], (*path, key))
    return inner


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    data = parse_value(write_flow(VALID), "valid", {}).data[""]
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(_paths(data)))
        target = data
        for part in path[:-1]:
            target = target[part]
        action = draw(st.sampled_from(["replace", "remove", "rename"]))
        if action == "remove":
            del target[path[-1]]
        elif action == "rename" and isinstance(target, dict):
            target[draw(st.sampled_from([*WORDS, "train.clip.value"]))] = target.pop(path[-1])
        else:
            target[path[-1]] = draw(values)
    return data


def _check_form(error: SpecError) -> None:
    lines = str(error).split("\n")
    assert len(lines) == len(error.problems) > 0
    for line in lines:
        assert PROBLEM.fullmatch(line), line


def _check_round_trip(spec: SweepSpec) -> None:
    text = spec.to_yaml()
    again = parse_spec(text, "again", environ={})
    assert again == spec
    assert again.to_yaml() == text


def _check_mutated(data: dict[str, Any]) -> None:
    try:
        spec = parse_spec(write_flow(data), "s.yaml", environ={})
    except SpecError as error:
        _check_form(error)
    else:
        _check_round_trip(spec)
        spec.trial_config(0, {})


@settings(max_examples=150, deadline=None)
@given(mutated())
def test_a_mutated_spec_is_valid_or_refused_in_form(data: dict[str, Any]) -> None:
    _check_mutated(data)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None)
@given(mutated())
def test_ten_thousand_mutated_specs_are_valid_or_refused(data: dict[str, Any]) -> None:
    _check_mutated(data)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_text_with_a_hole_is_valid_or_refused_in_form(data: st.DataObject) -> None:
    text = parse_spec(write_flow(VALID), "s.yaml").to_yaml()
    start = data.draw(st.integers(0, len(text)))
    noise = data.draw(st.text(alphabet="ab1{}[]:,-&*!#'\"\t\n |>%@\x00\\", max_size=4))
    torn = text[:start] + noise + text[start + data.draw(st.integers(0, 4)) :]
    try:
        _check_round_trip(parse_spec(torn, "s.yaml", environ={}))
    except SpecError as error:
        _check_form(error)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["trials", "train", "space.x", "task.y", "a.b", "", "budget.epochs"]), values
)
def test_any_override_is_valid_or_refused_in_form(key: str, value: Any) -> None:
    try:
        parse_spec(write_flow(VALID), "s.yaml", [f"{key}={write_flow(value)}"], environ={})
    except SpecError as error:
        _check_form(error)


printable = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        printable,
        st.sampled_from(WORDS),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(printable, inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(plain_values)
def test_written_spec_reads_the_same(value: Any) -> None:
    document = parse_value(write_flow(value), "here", {})
    assert not document.problems
    assert document.data[""] == value
    assert repr(document.data[""]) == repr(value)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(printable.filter(lambda key: key != "name"), plain_values, max_size=4),
    st.integers(1, 10**6),
    st.floats(min_value=1e-12, max_value=1e12),
)
def test_any_valid_spec_survives_writing(
    arguments: dict[str, Any], trials: int, lr: float
) -> None:
    data = {
        **VALID,
        "task": {"name": "a", **arguments},
        "trials": trials,
        "train": {"optimizer": {"lr": lr}},
    }
    try:
        spec = parse_spec(write_flow(data), "s.yaml", environ={})
    except SpecError as error:
        # Infinite numbers and credentials are data to YAML, and refused in a spec.
        known = ("not finite", "credentials", "looks like a secret")
        others = [p for p in error.problems if not any(word in p.message for word in known)]
        if others:
            raise
    else:
        assert math.isclose(spec.train.optimizer.lr, lr, rel_tol=0)
        _check_round_trip(spec)
