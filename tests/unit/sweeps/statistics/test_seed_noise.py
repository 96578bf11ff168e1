"""The mean of a configuration over its seeds, its error, and the noise of seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sweeps.statistics.seed_noise import TwoWayLayout, mean_and_error, mean_error, noise_floor

NAN = math.nan


def test_the_error_of_a_mean_is_that_of_the_textbook():
    assert mean_and_error([1.0, 2.0, 3.0, 4.0]) == (2.5, pytest.approx(0.6455, abs=1e-4), 4)
    assert mean_and_error([2.0]) == (2.0, None, 1)


def test_a_median_is_less_certain_than_a_mean_of_three_or_more():
    assert mean_and_error([1.0, 9.0, 2.0], "median").value == 2.0
    ratio = mean_and_error([1.0, 9.0, 2.0], "median").error / mean_and_error([1.0, 9.0, 2.0]).error
    assert ratio == pytest.approx(1.2533, abs=1e-4)
    assert mean_and_error([1.0, 9.0], "median") == mean_and_error([1.0, 9.0])


def test_a_value_that_is_not_finite_leaves_no_error():
    assert math.isnan(mean_and_error([1.0, NAN]).value)
    assert mean_and_error([1.0, 2.0, math.inf], "median") == (2.0, None, 3)
    with pytest.raises(ValueError, match="no value"):
        mean_and_error([])


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


def test_a_noisier_configuration_has_a_larger_error():
    values = np.random.default_rng(2).normal(size=(4, 5)) * np.array([[1], [1], [1], [9]])
    noise = noise_floor(values)
    assert mean_error(values[3], noise)[0] > 1.5 * mean_error(values[0], noise)[0]
