"""Statistics agree with other ways to compute them: by hand, by SciPy, or by an integral."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sweeps.statistics.common_seeds import (
    NoiseFloor,
    TwoWayLayout,
    half_width,
    mean_error,
    noise_floor,
    paired_difference,
    table_of,
)
from sweeps.statistics.over_seeds import standard_error
from sweeps.statistics.proportions import wilson_interval
from sweeps.statistics.race import race
from sweeps.statistics.variance_shares import least_count, variance_shares

integrate = pytest.importorskip("scipy.integrate")
special = pytest.importorskip("scipy.special")
stats = pytest.importorskip("scipy.stats")


def test_freedom_of_the_noise_floor_by_hand() -> None:
    """Two configurations under three seeds, by the two-way table of sums of squares.

    Within: 14 and 6, with 2 + 2 degrees of freedom. Of these, 1 with 2 is left without what the
    seeds share (residuals -0.5, 0, 0.5 and the opposite), and 19 with 2 is shared.
    """
    found = noise_floor(np.array([[1.0, 2.0, 6.0], [3.0, 3.0, 6.0]]))
    assert found is not None
    assert found.sd == pytest.approx(math.sqrt(20 / 4))
    assert found.freedom == pytest.approx(20**2 / (19**2 / 2 + 1**2 / 2))
    assert (found.num_values, found.num_configurations) == (6, 2)


@pytest.mark.parametrize(
    ("values", "freedom", "variance", "expected_freedom"),
    [
        # Own squares 2 with 1 degree, and four times the pooled variance of 3; of two values.
        ([1.0, 3.0], 6.0, (2 + 4 * 3) / (4 + 1) / 2, 5.0),
        # Own squares 14 with 2; of three values.
        ([1.0, 2.0, 6.0], 6.0, (14 + 4 * 3) / (4 + 2) / 3, 6.0),
        # No more weight than the pooled variance has degrees of freedom, and no more in all.
        ([1.0, 3.0, math.nan], 2.5, (2 + 2.5 * 3) / (2.5 + 1) / 2, 2.5),
        # A single value has the pooled variance alone.
        ([7.0], 6.0, 3.0, 4.0),
    ],
)
def test_error_of_a_mean_by_hand(
    values: list[float], freedom: float, variance: float, expected_freedom: float
) -> None:
    noise = NoiseFloor(math.sqrt(3), freedom, 10, 4)
    found = mean_error(np.array(values), noise)
    assert found == pytest.approx((math.sqrt(variance), expected_freedom))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_paired_difference_is_that_of_scipy(count: int) -> None:
    first, second = np.random.default_rng(count).normal(size=(2, count))
    found = paired_difference(first, second, 0.1)
    assert found is not None
    low, high = stats.ttest_rel(first, second).confidence_interval(0.9)
    assert found.mean - found.half_width == pytest.approx(low)
    assert found.mean + found.half_width == pytest.approx(high)


def test_widths_and_errors_agree_with_scipy() -> None:
    assert half_width(2.0, 3.5, 0.05) == pytest.approx(2 * stats.t.ppf(0.975, 3.5))
    assert standard_error([1.0, 3.0, 8.0], "mean") == pytest.approx(stats.sem([1.0, 3.0, 8.0]))
    factor = math.sqrt(math.pi / 2)
    assert standard_error([1.0, 3.0], "median") == pytest.approx(factor * stats.sem([1.0, 3.0]))
    for level in (0.95, 0.9):
        interval = stats.binomtest(3, 11).proportion_ci(level, method="wilson")
        assert wilson_interval(3, 11, level) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("first", "second"),
    [([1.0, 1.4, 0.9], [1.5, 1.4, 1.6]), ([1.0, 1.2], [1.3, 1.6]), ([0, 1, 2, 4], [0, 2, 4, 4])],
)
def test_chance_of_the_better_of_two_is_that_of_an_integral(
    first: list[float], second: list[float]
) -> None:
    """Under each degree of shrinkage B it is Student's; all degrees are equally likely before.

    With n seeds the difference of the means, divided by the root of 2, is z. Its variance is the
    noise divided by n, and around 0 it is 1 / B times that. S is the sum of squared residuals.
    """
    table = np.array([first, second], dtype=float)
    n = table.shape[1]
    apart = table[0] - table[1]
    z = apart.mean() / math.sqrt(2)
    squares = ((apart - apart.mean()) ** 2).sum() / 2

    def likelihood(b: float) -> float:
        return math.sqrt(b) * (squares + z * z * n * b) ** (-n / 2)

    def better(b: float) -> float:
        scale = math.sqrt((1 - b) / n * (squares + z * z * n * b) / n)
        return likelihood(b) * float(stats.t.cdf(-(1 - b) * z / scale, n))

    expected = integrate.quad(better, 0, 1)[0] / integrate.quad(likelihood, 0, 1)[0]
    found = race({0: first, 1: second}, minimize=True)
    assert found[0].p_best == pytest.approx(expected, abs=0.01)  # of 20,000 draws


def test_shares_of_one_parameter_are_those_of_a_regression() -> None:
    random = np.random.default_rng(3)
    places = random.random(60)
    values = places + 0.2 * random.normal(size=60)
    scores = stats.norm.ppf((stats.rankdata(values) - 0.5) / 60)
    columns = [math.sqrt(2 * n + 1) * special.eval_legendre(n, 2 * places - 1) for n in range(4)]
    design = np.stack(columns, axis=1)
    solution, (rest,), *_ = np.linalg.lstsq(design, scores, rcond=None)
    noise = rest / (60 - 4)
    spread = noise * np.linalg.inv(design.T @ design)[1:, 1:]
    own = solution[1:]
    square = own @ own - np.trace(spread)
    error = math.sqrt(2 * (spread**2).sum() + 4 * own @ spread @ own)
    found = variance_shares({"x": places.tolist()}, values.tolist())
    assert found is not None
    share = found.shares["x"]
    assert share.value == pytest.approx(square / (square + noise))
    assert share.low == pytest.approx((square - 1.96 * error) / (square + noise))
    assert share.high == pytest.approx(min(1.0, (square + 1.96 * error) / (square + noise)))
    assert share.chance == pytest.approx(
        stats.f.sf(own @ np.linalg.solve(spread, own) / 3, 3, 56), rel=1e-6
    )
    assert found.explained == pytest.approx(1 - noise / scores.var(ddof=1))
    assert least_count({"x": places.tolist()}) == 6
    assert variance_shares({"x": places[:6].tolist()}, values[:6].tolist()) is not None
    assert variance_shares({"x": places[:5].tolist()}, values[:5].tolist()) is None


NAN = float("nan")


def test_the_layout_of_complete_values_is_that_of_the_means():
    values = np.random.default_rng(0).normal(size=(4, 6))
    layout = TwoWayLayout(values)
    means = values.mean(axis=1)
    assert layout.effects == pytest.approx(means - means.mean())
    assert layout.freedom == 3 * 5
    rest = values - means[:, None] - values.mean(axis=0) + values.mean()
    assert layout.squares == pytest.approx((rest**2).sum())


def test_the_layout_compares_over_the_seeds_that_two_share():
    """The second lacks the seed that was bad for all."""
    layout = TwoWayLayout(np.array([[1.0, 2.0, 90.0], [2.0, 3.0, NAN]]))
    assert layout.effects[1] - layout.effects[0] == pytest.approx(1.0)
    apart = TwoWayLayout(np.array([[1.0, NAN], [NAN, 2.0]]))
    assert not apart.information.any()


def test_common_seeds_are_less_evidence_than_own_ones():
    random = np.random.default_rng(1)
    own = random.normal(size=(5, 5))
    common = np.tile(random.normal(size=5), (5, 1)) + 0.01 * own
    assert noise_floor(own).freedom == pytest.approx(20, abs=2)
    assert noise_floor(common).freedom == pytest.approx(4, abs=0.1)
    assert noise_floor(np.array([[1.0, NAN]])) is None


def test_common_seeds_cancel_in_pairs():
    values = table_of({0: {0: 1.0, 1: 5.0, 2: 9.0, 3: 4.0}, 1: {0: 2.0, 1: 6.1, 2: 9.9}})
    found = paired_difference(*values, level=0.05)
    assert found.mean == pytest.approx(-1.0)
    assert found.half_width < 0.3
    assert paired_difference(*values[:, 2:], level=0.05) is None


def test_a_noisier_configuration_has_a_larger_error():
    values = np.random.default_rng(2).normal(size=(4, 5)) * np.array([[1], [1], [1], [9]])
    noise = noise_floor(values)
    assert mean_error(values[3], noise)[0] > 1.5 * mean_error(values[0], noise)[0]
