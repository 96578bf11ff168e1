"""Distributions: reading the short form, writing it, and converting it for Optuna."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from pydantic import TypeAdapter

from sweeps.errors import UserError
from sweeps.spec.priors import Prior
from sweeps.spec.sections import Space
from sweeps.spec.space import (
    KINDS,
    Choice,
    Distribution,
    Int,
    LogInt,
    LogUniform,
    QUniform,
    Scalar,
    Uniform,
)
from sweeps.spec.space_parser import parse_distribution
from sweeps.spec.yaml_reader import parse_value

CASES: list[tuple[str, Distribution, BaseDistribution]] = [
    ("{uniform: [0, 0.3]}", Uniform(0.0, 0.3), FloatDistribution(0, 0.3)),
    ("{loguniform: [1e-4, 0.1]}", LogUniform(1e-4, 0.1), FloatDistribution(1e-4, 0.1, log=True)),
    ("{quniform: [0, 0.3, 0.1]}", QUniform(0.0, 0.3, 0.1), FloatDistribution(0, 0.3, step=0.1)),
    ("{int: [1, 8]}", Int(1, 8), IntDistribution(1, 8)),
    ("{logint: [1, 256]}", LogInt(1, 256), IntDistribution(1, 256, log=True)),
    (
        "{choice: [adam, sgd, null, 3, 0.5]}",
        Choice(("adam", "sgd", None, 3, 0.5)),
        CategoricalDistribution(("adam", "sgd", None, 3, 0.5)),
    ),
]


@pytest.mark.parametrize(("text", "expected", "optuna"), CASES)
def test_reading_and_handing_over(
    text: str, expected: Distribution, optuna: BaseDistribution
) -> None:
    distribution = parse_distribution(parse_value(text, "here", {}).data[""])
    assert distribution == expected
    assert type(distribution) is type(expected)
    assert distribution.to_optuna() == optuna


def test_every_kind_has_a_case() -> None:
    elsewhere = {"powers"}  # test_space_remedies
    assert {case[1].name for case in CASES} | elsewhere == set(KINDS)


finite = st.floats(-1e9, 1e9)
positive = st.floats(1e-9, 1e9)
distributions = st.one_of(
    st.tuples(finite, finite).filter(lambda b: b[0] < b[1]).map(lambda b: Uniform(*b)),
    st.tuples(positive, positive).filter(lambda b: b[0] < b[1]).map(lambda b: LogUniform(*b)),
    st.tuples(st.integers(-100, 100), st.integers(1, 100)).map(lambda b: Int(b[0], b[0] + b[1])),
    st.tuples(st.integers(-100, 100), st.integers(1, 9), st.integers(2, 9)).map(
        lambda b: Int(b[0], b[0] + b[1] * b[2], b[2])
    ),
    st.tuples(st.integers(1, 100), st.integers(1, 100)).map(lambda b: LogInt(b[0], b[0] + b[1])),
    st.tuples(st.integers(-9, 9), st.integers(1, 9)).map(
        lambda b: QUniform(float(b[0]), float(b[0]) + b[1] * 0.5, 0.5)
    ),
    st.lists(
        st.one_of(st.none(), st.integers(2, 99), st.text(max_size=5)), min_size=1, unique=True
    ).map(lambda options: Choice(tuple(options))),
)


conditions = st.dictionaries(
    st.sampled_from(["task.a", "train.optimizer.name", "x: y"]),
    st.lists(st.one_of(st.none(), st.integers(2, 99), st.text(max_size=5)), min_size=1).map(tuple),
    max_size=2,
).map(lambda found: tuple(found.items()))


_SPACE = TypeAdapter(Space)
"""As a sweep stores it."""


@given(distributions, conditions, st.none() | st.floats(0, 0.99), st.sampled_from([0.1, 0.3]))
def test_the_written_form_reads_the_same(
    distribution: Distribution,
    when: tuple[tuple[str, tuple[Scalar, ...]], ...],
    prior: float | None,
    width: float,
) -> None:
    known = None if prior is None else Prior(distribution.at(prior), width)
    distribution = replace(distribution, when=when, prior=known)
    document = parse_value(str(distribution), "here", {})
    assert not document.problems
    assert parse_distribution(document.data[""]) == distribution
    assert _SPACE.dump_python({"task.a": distribution}) == {"task.a": distribution.to_data()}


@given(distributions)
def test_probes_lie_within_and_reach_the_ends(distribution: Distribution) -> None:
    optuna = distribution.to_optuna()
    boundary_values = distribution.boundary_values()
    assert all(optuna._contains(optuna.to_internal_repr(value)) for _, value in boundary_values)
    arguments = distribution.arguments()
    assert all(value == arguments[index] for index, value in boundary_values if index is not None)


@given(distributions, st.floats(0, 1, exclude_max=True))
def test_sampled_value_is_contained_and_projects_to_itself(
    distribution: Distribution, share: float
) -> None:
    value, optuna = distribution.at(share), distribution.to_optuna()
    assert distribution.contains(value)
    assert optuna._contains(optuna.to_internal_repr(value))
    own = distribution.normalize(value)
    assert (own, type(own)) == (value, type(value))


@given(distributions, st.floats(0, 1, exclude_max=True))
def test_share_of_a_value_leads_back_to_it(distribution: Distribution, share: float) -> None:
    value = distribution.at(share)
    found = distribution.at(min(distribution.share(value), math.nextafter(1.0, 0.0)))
    assert distribution.identity(found) == pytest.approx(distribution.identity(value), abs=2e-6)


@settings(deadline=None)
@given(distributions)
def test_a_grid_s_values_are_all_there_are(distribution: Distribution) -> None:
    values = distribution.values()
    if values is not None:
        found = list(values)
        assert all(map(distribution.contains, found))
        assert {distribution.at(index / 1000) for index in range(1000)} <= set(found)


@pytest.mark.parametrize(
    ("distribution", "outside"),
    [
        (Uniform(0.0, 1.0), [-0.1, 1.1, "0.5", True, None, math.nan]),
        (QUniform(0.0, 0.3, 0.1), [0.15, 0.4, "x"]),
        (Int(1, 8), [0, 9, 1.5, True, "3"]),
        (LogInt(1, 8), [0, 9, 2.5]),
        (Choice(("a", None, 3)), ["b", 4]),
    ],
)
def test_unreachable_value_is_not_contained(
    distribution: Distribution, outside: list[object]
) -> None:
    assert not any(map(distribution.contains, outside))


def test_integers_and_floats_are_interchangeable() -> None:
    assert repr(Uniform(0.0, 5.0).normalize(3)) == "3.0"
    assert repr(Int(0, 5).normalize(3.0)) == "3"
    assert repr(Choice((1.0, 2.0)).normalize(1)) == "1.0"


def test_a_rounding_error_beside_a_step_is_that_step() -> None:
    steps = QUniform(0.1, 0.3, 0.1)
    for value, own in ((0.1 + 2 * 0.1, 0.3), (0.1 - 1e-12, 0.1), (0.2 + 1e-12, 0.2)):
        assert steps.contains(value)
        assert steps.normalize(value) == own
    assert not any(map(steps.contains, (0.0, 0.4, 0.25, 0.3001, math.nan, math.inf, -math.inf)))


def test_step_that_optuna_rejects_is_kept_as_sampled() -> None:
    many, drawn = QUniform(1000.0, 100_000.0, 0.001), 80922.16500000001
    assert many.contains(drawn)
    assert not many.to_optuna()._contains(80922.165)
    assert many.normalize(drawn) == drawn


def test_few_integers_are_all_probed() -> None:
    assert sorted(value for _, value in Int(1, 5).boundary_values()) == [1, 2, 3, 4, 5]
    assert sorted(value for _, value in Int(1, 10**6).boundary_values()) == [*range(1, 102), 10**6]


def test_a_distribution_built_in_python_is_checked_too() -> None:
    with pytest.raises(UserError, match="low is below high"):
        parse_distribution(Uniform(1.0, 0.0))


def test_issue_names_the_place_inside_the_distribution() -> None:
    with pytest.raises(UserError) as caught:
        parse_distribution({"loguniform": [0, "x"]})
    assert [fault.path for fault in caught.value.faults] == [("loguniform", 0), ("loguniform", 1)]
