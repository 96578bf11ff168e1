"""Limits on reported metrics: margins, violations, sentences, and values that rules compare."""

from __future__ import annotations

import math

import pytest

from sweeps.statistics.feasibility import INFEASIBLE_LOSS, Limits, reported_metrics

CONSTRAINTS: dict[str, dict[str, float | None]] = {
    "ms": {"max": 4.0, "min": None},
    "recall": {"min": 0.5},
    "drift": {"max": 0.0},
}
LIMITS = Limits.of(CONSTRAINTS, ["loss", "recall"])
FEASIBLE = (0.3, 0.5, 4.0, -1.0)  # loss, recall, ms, drift: the limits themselves are allowed


def test_columns_are_the_metrics_and_then_those_that_are_only_limited() -> None:
    assert reported_metrics(["loss", "recall"], CONSTRAINTS) == ("loss", "recall", "ms", "drift")
    assert [(one.metric, one.column, one.kind) for one in LIMITS.each] == [
        ("ms", 2, "max"),
        ("recall", 1, "min"),
        ("drift", 3, "max"),
    ]
    assert LIMITS
    assert not Limits.of({}, ["loss"])


def test_a_value_at_its_limit_is_feasible() -> None:
    assert LIMITS.violation(FEASIBLE) == 0
    assert LIMITS.missed(FEASIBLE) == {}
    assert LIMITS.sentence(FEASIBLE) == ""
    assert LIMITS.compared(FEASIBLE, (True, False)) == FEASIBLE[:2]


def test_margins_are_shares_of_the_limits_and_amounts_are_in_units_of_the_metrics() -> None:
    values = (0.3, 0.4, 5.0, 0.25)
    assert LIMITS.margins(values) == pytest.approx([0.25, 0.2, 0.25])
    assert LIMITS.violation(values) == pytest.approx(0.7)
    assert LIMITS.missed(values) == pytest.approx({"ms": 1.0, "recall": 0.1, "drift": 0.25})
    assert LIMITS.sentence(values) == (
        "ms 5, at most 4 allowed; recall 0.4, at least 0.5 allowed; drift 0.25, at most 0 allowed"
    )
    assert LIMITS.margins((0.3, 0.5, 1e308, 0.0))[0] < math.inf


def test_rules_compare_feasible_reports_first_and_then_by_violation() -> None:
    bad, worse = (0.1, 0.9, 5.0, 0.0), (0.0, 1.0, 1e308, 0.0)
    for low in (True, False):
        sign = 1 if low else -1
        each = [sign * LIMITS.compared(one, (low, low))[0] for one in (bad, worse)]
        assert INFEASIBLE_LOSS < each[0] < each[1] < math.inf
