"""Properties of a race that hold for any values, and what it decides on some."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.statistics.race import race

VALUE = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3))
TABLES = st.lists(st.lists(VALUE, min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda rows: dict(enumerate(rows))
)


def _made(gaps, seeds, *, noise=1.0, shared=1.0, seed=0):
    """Values of configurations whose means differ by `gaps`; less is better."""
    random = np.random.default_rng(seed)
    common = random.normal(0, shared, seeds)
    return {i: list(gap + common + random.normal(0, noise, seeds)) for i, gap in enumerate(gaps)}


@settings(max_examples=40, deadline=None)
@given(TABLES)
def test_chances_add_up_and_dropped_ones_stay_out(values):
    found = race(values, minimize=True)
    assert sorted(one.number for one in found.contenders) == sorted(values)
    chances = [one.p_best for one in found.contenders]
    if None not in chances:
        assert sum(chances) == pytest.approx(1)
    assert found.alive
    assert not found.leader.dropped
    assert found.leader.number in found.tied
    assert set(found.tied) <= set(found.alive)


@settings(max_examples=30, deadline=None)
@given(TABLES, st.randoms(use_true_random=False))
def test_the_order_of_configurations_does_not_matter(values, chance: random.Random):
    numbers = list(values)
    chance.shuffle(numbers)
    shuffled = race({number: values[number] for number in numbers}, minimize=True)
    assert repr(shuffled) == repr(race(values, minimize=True))


@settings(max_examples=30, deadline=None)
@given(TABLES)
def test_maximizing_mirrors_minimizing(values):
    mirrored = {n: [-v for v in row] for n, row in values.items()}
    less, more = race(values, minimize=True), race(mirrored, minimize=False)
    assert (less.alive, less.tied, less.decided) == (more.alive, more.tied, more.decided)
    for one, other in zip(less.contenders, more.contenders, strict=True):
        assert (one.number, one.p_best) == (other.number, other.p_best)
        assert one.mean == -other.mean
        if one.low is not None:
            assert one.low == -other.high


def test_a_shift_that_all_share_under_a_seed_does_not_matter():
    values = _made([0, 1, 2], 4)
    shifted = {n: [v + 100 * s for s, v in enumerate(row)] for n, row in values.items()}
    before, after = race(values, minimize=True), race(shifted, minimize=True)
    for one, other in zip(before.contenders, after.contenders, strict=True):
        assert one.number == other.number
        assert one.p_best == pytest.approx(other.p_best, abs=1e-3)
    assert after.noise.sd > 100 > before.noise.sd  # but the mean of one depends on its seeds


def test_whoever_is_dropped_at_one_look_stays_dropped():
    values = _made([0, 0.2, 30], 2)
    assert set(race(values, minimize=True).alive) == {0, 1}
    longer = {0: [*values[0], 90.0], 1: [*values[1], 10.0], 2: values[2]}
    assert 2 not in race(longer, minimize=True).alive


def test_one_seed_decides_nothing_and_drops_nobody():
    found = race({1: [0.0], 2: [100.0]}, minimize=True)
    assert [one.p_best for one in found.contenders] == [None, None]
    assert (found.noise, found.leader.low, found.decided) == (None, None, False)
    assert set(found.tied) == set(found.alive) == {1, 2}


def test_seeds_that_change_nothing_decide_at_once():
    found = race({1: [0.5, 0.5], 2: [0.4, 0.4], 3: [0.4, 0.4]}, minimize=False)
    assert (found.leader.number, found.decided, found.noise.sd) == (1, True, 0)
    tied = race({1: [0.1 + 0.2] * 3, 2: [0.3] * 3}, minimize=True)
    assert set(tied.tied) == {1, 2}
    assert not tied.decided


@pytest.mark.parametrize(("minimize", "original"), [(True, -2.0), (False, 2.0)])
def test_optimism_is_positive_if_the_original_looked_better(minimize, original):
    values = {1: [0.0, 0.2, -0.2], 2: [1.0, 1.1, 0.9]}
    found = race(values, minimize=minimize, original={1: original})[1]
    assert found.optimism == pytest.approx(2.0)
    assert found.optimism_low < 2.0 < found.optimism_high
    width = found.high - found.low
    assert found.optimism_high - found.optimism_low == pytest.approx(width)


def test_the_best_is_seldom_dropped():
    """At most 5 % in the whole race; with equal means each is the best as well as another."""
    wrong = sum(
        race(_made([0, 0.1, 0.2, 1, 2], 5, seed=seed), minimize=True)[0].dropped
        for seed in range(60)
    )
    assert wrong <= 3


def test_whoever_is_dropped_is_not_tied():
    """Number 0 was dropped at the third seed, and looks better again under the last ones."""
    found = race(_made([0, 0.1, 9, 0], 5, seed=0), minimize=True)
    assert found[0].dropped
    assert found[0].p_best > 0.05
    assert 0 not in found.tied


def test_pooled_noise_tells_apart_and_the_least_expected_loss_leads() -> None:
    """The means are 0.278 apart; pooled noise of two degrees of freedom makes up to 0.177."""
    found = race({2: [1.484, 1.408], 1: [1.152, 1.184]}, minimize=True)
    assert found.noise is not None
    assert found.noise.sd == pytest.approx(math.sqrt((2 * 0.016**2 + 2 * 0.038**2) / 2))
    assert [one.number for one in found.contenders] == [1, 2]
    assert found.tied == (1,)
    near = race({2: [1.484, 1.408], 1: [1.312, 1.344]}, minimize=True)
    assert [one.number for one in near.contenders] == [1, 2]
    assert near.tied == (1, 2)
