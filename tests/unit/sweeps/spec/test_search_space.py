"""Points of a search space: active parameters and constraints."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.errors import UserError
from sweeps.spec.constraints import Constraint, parse_constraint
from sweeps.spec.search_space import SearchSpace
from sweeps.spec.space_parser import parse_distribution


def _space(*constraints: str, fixed: dict[str, Any] | None = None) -> SearchSpace:
    data: dict[str, Any] = {
        "deep": {"int": [1, 4], "when": {"kind": ["b", "c"], "wide": "yes"}},
        "wide": {"choice": ["yes", "no"], "when": {"kind": "b"}},
        "kind": {"choice": ["a", "b", "c"]},
        "rate": {"quniform": [0, 1, 0.25]},
    }
    return SearchSpace(
        {key: parse_distribution(one) for key, one in data.items()},
        [parse_constraint(text) for text in constraints],
        fixed or {},
    )


def test_parameters_follow_their_conditions() -> None:
    assert [key for key, _ in _space().ordered()] == ["kind", "wide", "deep", "rate"]


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_sampled_point_is_active_and_projects_to_itself(seed: int) -> None:
    space = _space("deep < 4 * rate + 2")
    point = space.draw(seed)
    assert point is not None
    assert ("wide" in point) is (point["kind"] == "b")
    assert ("deep" in point) is (point.get("wide") == "yes")
    assert "deep" not in point or point["deep"] < 4 * point["rate"] + 2
    assert space.project(point) == point
    assert space.project({**point, "other": 3}) == point
    assert point in list(space.grid())


def test_grid_has_every_point_once() -> None:
    space = _space("deep + rate > 2")
    points = list(space.grid())
    assert points[:5] == [{"kind": "a", "rate": rate} for rate in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert all(one != other for one, other in itertools.combinations(points, 2))
    assert len(points) == 5 + (5 + (0 + 4 + 5 + 5)) + 5


def test_given_values_are_kept() -> None:
    points = [_space().draw(seed, {"kind": "b", "rate": 1}) for seed in range(20)]
    assert {(one["kind"], one["rate"]) for one in points if one} == {("b", 1.0)}
    assert len({one["wide"] for one in points if one}) == 2
    assert _space("rate < 0.5").draw(0, {"rate": 1}, attempts=100) is None


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "a"},
        {"kind": "x", "rate": 0.5},
        {"kind": "b", "rate": 0.5},
        {"kind": "a", "rate": 0.3},
        {"kind": "a", "rate": 0.75},
    ],
)
def test_value_outside_is_not_projected(values: dict[str, Any]) -> None:
    assert _space("rate < 0.7").project(values) is None


# Constraints

KEYS = ["a", "b.c", "d_1.e"]
numbers = st.one_of(st.integers(-20, 20), st.sampled_from([0.5, 1e-3, 2.5]))
terms = st.recursive(
    st.one_of(numbers.map(str), st.sampled_from(KEYS)),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        inner.map(lambda one: f"-{one}"),
    ),
    max_leaves=6,
)
comparisons = st.lists(
    st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), terms), min_size=1, max_size=2
)


@settings(deadline=None)
@given(terms, comparisons, st.tuples(numbers, numbers, numbers))
def test_a_constraint_means_what_python_means(
    first: str, others: list[tuple[str, str]], values: tuple[float, float, float]
) -> None:
    text = " ".join([first, *itertools.chain.from_iterable(others)])
    if not any(key in text for key in KEYS):
        with pytest.raises(UserError, match="names no key"):
            parse_constraint(text)
        return
    point = dict(zip(KEYS, values, strict=True))
    plain = text
    for key, value in point.items():
        plain = plain.replace(key, f"({value})")
    try:
        expected = eval(plain)
    except ZeroDivisionError:
        expected = False
    assert parse_constraint(text).holds(point) is expected


@settings(deadline=None)
@given(st.text(alphabet="ab.<>=!+-*/%()[]{}'\"0189 ,:@\n\x00é\\", max_size=40))
def test_any_text_is_a_constraint_or_refused(text: str) -> None:
    with contextlib.suppress(UserError):
        assert isinstance(parse_constraint(text), Constraint)


def test_deep_and_long_texts_are_refused() -> None:
    for text in ("(" * 149 + "a" + ")" * 149 + "<1", "-" * 250 + "a < 1", "a < " + "1" * 300):
        with contextlib.suppress(UserError):
            parse_constraint(text)
    with pytest.raises(UserError, match="at most 300"):
        parse_constraint("a < " + "1 + " * 80 + "1")


def test_constraint_on_inactive_parameter_is_ignored() -> None:
    one = parse_constraint("a < b")
    assert one.holds({"a": 1})
    assert not one.holds({"a": 1, "b": 1})
