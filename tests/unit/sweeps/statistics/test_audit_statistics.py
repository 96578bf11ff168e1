"""The statistics of the audit agree with their definitions, and their intervals hold the truth."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.statistics.chi_squared import chi_squared_tail
from sweeps.statistics.proportions import binomial_tail, hypergeometric_tail, wilson_interval
from sweeps.statistics.rank_correlation import kendall
from sweeps.statistics.variance_shares import variance_shares

def test_kendall_counts_pairs_and_ties() -> None:
    first = [1.0, 2.0, 3.0, 4.0, 4.0, 6.0, 7.0, 8.0, 9.0]
    second = [2.0, 1.0, 3.0, 5.0, 4.0, 6.0, 6.0, 9.0, 8.0]
    scipy = pytest.importorskip("scipy.stats")
    found = kendall(first, second)
    assert found is not None
    assert found.tau == pytest.approx(scipy.kendalltau(first, second).statistic)
    assert found.low < found.tau < found.high
    assert kendall(first[:7], second[:7]) is None
    assert kendall([1.0] * 9, second) is None


def test_interval_of_kendall_holds_the_truth() -> None:
    rho, held = 0.7, 0
    truth = 2 / math.pi * math.asin(rho)  # of two normal variables
    for seed in range(300):
        draw = random.Random(seed)
        x = [draw.gauss(0, 1) for _ in range(20)]
        y = [rho * one + math.sqrt(1 - rho**2) * draw.gauss(0, 1) for one in x]
        found = kendall(x, y)
        assert found is not None
        held += found.low <= truth <= found.high
    assert 0.91 <= held / 300 <= 0.99


@given(count=st.integers(1, 40), data=st.data())
def test_wilson_interval_holds_the_share(count: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, count))
    low, high = wilson_interval(hits, count)
    assert 0 <= low <= hits / count + 1e-12
    assert hits / count - 1e-12 <= high <= 1
    mirrored = wilson_interval(count - hits, count)
    assert mirrored == pytest.approx((1 - high, 1 - low))


def test_tails_agree_with_scipy() -> None:
    scipy = pytest.importorskip("scipy.stats")
    assert binomial_tail(4, 10, 0.2) == pytest.approx(scipy.binom.sf(3, 10, 0.2))
    assert binomial_tail(450, 2000, 0.2) == pytest.approx(scipy.binom.sf(449, 2000, 0.2))
    assert [binomial_tail(n, 5, p) for n, p in ((0, 0.0), (1, 0.0), (5, 1.0))] == [1, 0, 1]
    assert hypergeometric_tail(3, 6, 9, 30) == pytest.approx(scipy.hypergeom.sf(2, 30, 9, 6))
    many = 10_000, 2_000, 1_000
    assert hypergeometric_tail(220, *many[1:], many[0]) == pytest.approx(
        scipy.hypergeom.sf(219, *many)
    )
    assert chi_squared_tail(7.3, 3) == pytest.approx(scipy.chi2.sf(7.3, 3))


def _function(draw: random.Random, count: int) -> tuple[dict[str, list[float]], list[float]]:
    """Values of two parameters, alone and together, and a third one without effect."""
    x, y, z = ([2 * draw.random() - 1 for _ in range(count)] for _ in range(3))
    first = [math.sqrt(0.6 * 3) * a for a in x]
    second = [math.sqrt(0.2 * 3) * b for b in y]
    pair = [math.sqrt(0.2) * 3 * a * b for a, b in zip(x, y, strict=True)]
    values = [sum(parts) for parts in zip(first, second, pair, strict=True)]
    return {
        key: [(v + 1) / 2 for v in axis] for key, axis in zip("xyz", (x, y, z), strict=True)
    }, values


def test_variance_divides_among_parameters() -> None:
    places, values = _function(random.Random(0), 400)
    found = variance_shares(places, values)
    assert found is not None
    # Of the normal scores of 200,000 values: the variance of the means in 40 bins of x, and of y.
    assert found.alone["x"].value == pytest.approx(0.72, abs=0.03)
    assert found.alone["y"].value == pytest.approx(0.11, abs=0.03)
    assert found.pairs["x", "y"].value == pytest.approx(0.15, abs=0.03)
    assert found.total["z"].high < 0.02
    assert next(iter(found.pairs)) == ("x", "y")


def test_noise_has_no_shares() -> None:
    clear = 0
    for seed in range(40):
        draw = random.Random(seed)
        places = {key: [draw.random() for _ in range(60)] for key in "abc"}
        found = variance_shares(places, [draw.random() for _ in range(60)])
        assert found is not None
        clear += sum(one.chance < 0.01 for one in found.total.values())
    assert clear <= 6  # of 120, where chance makes one or two


def test_conditional_and_optional_parameters_have_shares() -> None:
    draw = random.Random(0)
    names = [draw.choice(["adam", "sgd"]) for _ in range(120)]
    momentum = [draw.random() if name == "sgd" else None for name in names]
    values = [
        (2.0 if name == "sgd" else 0.0) + (p or 0.0) + draw.gauss(0, 0.05)
        for name, p in zip(names, momentum, strict=True)
    ]
    found = variance_shares({"name": names, "momentum": momentum}, values)
    assert found is not None
    assert found.explained > 0.7


def test_few_trials_have_no_shares() -> None:
    assert variance_shares({"a": [0.1, 0.4, 0.9]}, [1.0, 2.0, 3.0]) is None
    assert variance_shares({"a": [0.1] * 30}, list(map(float, range(30)))) is None
