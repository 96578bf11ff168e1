"""Ranks by several metrics: the volume that a trial alone dominates, and places."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.statistics.fronts import fronts
from sweeps.stopping.metric_values import own_volumes, places


def _hypervolume(points: list[tuple[float, ...]], end: float) -> float:
    """By inclusion and exclusion."""
    total = 0.0
    for size in range(1, len(points) + 1):
        for some in itertools.combinations(points, size):
            corner = map(max, zip(*some, strict=True))
            total += (-1) ** (size + 1) * math.prod(end - one for one in corner)
    return total


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=2, max_size=6))
@settings(max_examples=50)
def test_volumes_are_hypervolume_contributions(points: list[tuple[float, ...]]) -> None:
    front = [*_front(points), (0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)]
    front = _front(front)
    if not all({0.0, 1.0} <= {one[axis] for one in front} for axis in range(3)):
        return  # an axis of another length is scaled
    for found, one in zip(own_volumes(front, (1.0,) * 3), front, strict=True):
        others = [other for other in front if other != one]
        expected = _hypervolume(front, 1.1) - _hypervolume(others, 1.1)
        assert found == pytest.approx(expected, abs=1e-9)


def _front(points: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    distinct = sorted(set(points))
    return [distinct[at] for at in next(fronts(distinct))]


def test_units_of_a_metric_do_not_matter() -> None:
    front = [(0.0, 1.0), (0.2, 0.4), (0.5, 0.3), (1.0, 0.0)]
    scaled = [(1e6 * a - 5, 1e-3 * b + 7) for a, b in front]
    plain = own_volumes(front, (1.0, 1.0))
    assert own_volumes(scaled, (1e6 - 5, 1e-3 + 7)) == pytest.approx(plain)
    assert plain.index(max(plain)) == 1, "the knee"


@pytest.mark.parametrize("num_metrics", [2, 3, 5, 20])
def test_a_large_front_takes_little_time_and_memory(num_metrics: int) -> None:
    rng = random.Random(0)
    front = [tuple(rng.random() for _ in range(num_metrics)) for _ in range(2000)]
    found = own_volumes(front, (1.0,) * num_metrics)
    assert len(found) == 2000
    assert all(one >= 0 and math.isfinite(one) for one in found)


def test_extreme_values_have_volumes() -> None:
    front = [(-1.7e308, 1.7e308), (0.0, 0.0), (1.7e308, -1.7e308)]
    assert all(map(math.isfinite, own_volumes(front, (1.7e308, 1.7e308))))
    assert own_volumes([(1.0, 1.0)], (1.0, 1.0)) == pytest.approx([1.21])


def test_places_are_by_front_and_then_by_volume() -> None:
    values = {
        0: (0.9, 0.1), 1: (0.1, 0.9), 2: (0.5, 0.5), 3: (0.51, 0.49), 4: (0.6, 0.6),
        5: (0.5, 0.5), 6: (math.nan, 0.0), 7: (0.9, 0.9),
    }  # fmt: skip
    found = places(values, (True, True))
    assert 6 not in found
    assert found[2] == found[5], "equal trials have the same place"
    assert max(found[n] for n in (0, 1, 2, 3, 5)) <= 5 < found[4] < found[7]
    assert {found[0], found[1]} == {1, 2}, "the ends of the front"
    turned = {n: (-a, b) for n, (a, b) in values.items()}
    assert places(turned, (False, True)) == found
