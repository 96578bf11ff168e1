"""The mean of a configuration over its seeds, its error, and the noise of seeds."""

from __future__ import annotations

import numpy as np
import pytest

from sweeps.statistics.common_seeds import (
    TwoWayLayout,
    half_width,
    mean_error,
    noise_floor,
    paired_difference,
    table_of,
)

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


def test_noise_is_pooled_over_configurations():
    several = {0: {0: 1.0, 1: 3.0}, 1: {0: 10.0, 1: 10.0, 2: 13.0}, 2: {2: 7.0}}
    found = noise_floor(table_of(several))
    assert found.sd == pytest.approx(((2.0 + 6.0) / 3) ** 0.5)
    assert (found.num_values, found.num_configurations) == (5, 2)
    assert 1 <= found.freedom <= 3
    assert noise_floor(table_of({0: {0: 1.0}, 1: {1: 2.0}})) is None
    assert half_width(1.0, 3, 0.05) == pytest.approx(3.1824, abs=1e-3)


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
