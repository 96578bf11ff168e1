"""The statistics of the audit agree with their definitions, and their intervals hold the truth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from sweeps.statistics.proportions import (
    binomial_tail,
    hypergeometric_tail,
    kendall,
)
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


@pytest.mark.parametrize("count", [1999])
def test_kendall_uses_all_things(count: int) -> None:
    scipy = pytest.importorskip("scipy.stats")
    draw = random.Random(count)
    first = [float(draw.randrange(200)) for _ in range(count)]
    second = [one + draw.gauss(0, 100) for one in first]
    found = kendall(first, second)
    assert found is not None
    assert found.tau == pytest.approx(scipy.kendalltau(first, second).statistic)
    assert found.num_pairs == count


def _interval(tau: float, square: float) -> tuple[float, float]:
    """The values t with (tau - t)**2 <= square (1 - t**2), found by bisection."""

    def outermost(end: float) -> float:
        near, far = tau, end
        for _ in range(60):
            middle = (near + far) / 2
            is_near = (tau - middle) ** 2 <= square * (1 - middle**2)
            near, far = (middle, far) if is_near else (near, middle)
        return near

    return outermost(-1.0), outermost(1.0)


_Z = 1.959964
_EXACT: dict[str, tuple[list[int], float, float]] = {
    # Nothing is known of r, so that its bound of 1/2 stands: 2 z^2 / 8.
    "all agree": ([1, 2, 3, 4, 5, 6, 7, 8], 1.0, _Z**2 * 2 / 8),
    # The first two and the last two in the opposite order: 2 of 28 pairs. Four things have a part
    # of 5/7 and four of 1, tau is 6/7, the squares add up to 8/49. r = (8/49 + 1) / (8 13/49 + 2).
    "two pairs differ": (
        [2, 1, 3, 4, 5, 6, 8, 7],
        6 / 7,
        _Z**2 * 2 * (1 + 12 * (57 / 202)) / 56,
    ),
    # 50 of 56 pairs are in order, the other ones tied in the second measurement: tau is the root
    # of 50/56. Less what ties do to it, the squares of the parts add up to 3/70, and
    # r = (3/70 + 1) / (20/7).
    "three are tied": (
        [1, 1, 1, 2, 3, 4, 5, 6],
        math.sqrt(50 / 56),
        _Z**2 * 2 * (math.sqrt(56 / 50) + 12 * (73 / 200)) / 56,
    ),
}


@pytest.mark.parametrize(("second", "tau", "square"), _EXACT.values(), ids=_EXACT)
def test_interval_of_kendall_by_hand(second: list[int], tau: float, square: float) -> None:
    found = kendall(range(8), second)
    assert found is not None
    assert found.tau == pytest.approx(tau)
    assert (found.low, found.high) == pytest.approx(_interval(tau, square), abs=1e-6)
    other = kendall(range(8), [-one for one in second])
    assert other is not None
    assert (other.low, other.high) == pytest.approx((-found.high, -found.low))


def _normal(draw: random.Random, part: float) -> tuple[float, float]:
    x = draw.gauss(0, 1)
    return x, part * x + math.sqrt(1 - part**2) * draw.gauss(0, 1)


def _tied(draw: random.Random, part: float) -> tuple[float, float]:
    x, y = _normal(draw, part)
    return float(round(x)), float(round(y))


def _mixed(draw: random.Random, part: float) -> tuple[float, float]:
    x = draw.random()
    return x, x if draw.random() < part else draw.random()


def _turned(draw: random.Random, part: float) -> tuple[float, float]:
    x = draw.random()
    return x, part - x if x < part else x


@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize(
    ("pair", "part", "truth"),
    [
        (_normal, 0.0, 0.0),
        (_normal, 0.7, 2 / math.pi * math.asin(0.7)),
        (_normal, 0.99, 2 / math.pi * math.asin(0.99)),
        (_tied, 0.3, 0.2257),  # by simulation, with 30 times 100,000 things
        (_tied, 0.9, 0.7606),
        (_mixed, 0.9, 0.81 + 2 * 0.9 * 0.1 / 3),  # as two, one or none of two are in order
        (_turned, 0.4, 1 - 2 * 0.4**2),
    ],
)
def test_interval_of_kendall_holds_the_truth(
    pair: Callable[[random.Random, float], tuple[float, float]],
    part: float,
    truth: float,
    count: int,
) -> None:
    draw, held = random.Random(count), 0
    for _ in range(300):
        x, y = zip(*(pair(draw, part) for _ in range(count)), strict=True)
        if (found := kendall(x, y)) is not None:
            held += found.low <= truth <= found.high
    assert held / 300 >= 0.93


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
    # 0.72 and 0.11 alone, and 0.15 together, of which each has half.
    assert found.shares["x"].value == pytest.approx(0.72 + 0.15 / 2, abs=0.03)
    assert found.shares["y"].value == pytest.approx(0.11 + 0.15 / 2, abs=0.03)
    assert found.pairs["x", "y"].value == pytest.approx(0.15, abs=0.03)
    assert found.shares["z"].high < 0.02
    assert next(iter(found.pairs)) == ("x", "y")


def test_noise_has_no_shares() -> None:
    clear = 0
    for seed in range(40):
        draw = random.Random(seed)
        places = {key: [draw.random() for _ in range(60)] for key in "abc"}
        found = variance_shares(places, [draw.random() for _ in range(60)])
        assert found is not None
        clear += sum(one.chance < 0.01 for one in found.shares.values())
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
