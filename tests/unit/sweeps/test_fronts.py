"""Fronts, and which points of a front are chosen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna._hypervolume.hssp import _solve_hssp
from optuna._hypervolume.wfg import compute_hypervolume

from sweeps.statistics.fronts import fronts, spread

Points = list[tuple[float, ...]]
COORDINATE = st.integers(0, 6)
POINTS = st.integers(2, 4).flatmap(
    lambda size: st.lists(st.tuples(*[COORDINATE] * size), min_size=1, max_size=12)
) | st.lists(  # coordinates that nearly agree: many fronts of few points
    st.tuples(st.integers(0, 20), st.integers(0, 1)).map(lambda one: (one[0], sum(one))),
    min_size=1,
    max_size=20,
)


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _peeled(points: Points) -> list[set[int]]:
    """Take one front after the other away, by the definition."""
    left, fronts = dict(enumerate(points)), []
    while left:
        fronts.append(
            {n for n, one in left.items() if not any(_dominates(o, one) for o in left.values())}
        )
        left = {n: one for n, one in left.items() if n not in fronts[-1]}
    return fronts


@given(POINTS)
def test_fronts_are_those_of_the_definition(points: Points) -> None:
    assert [one.tolist() for one in fronts(points)] == [sorted(one) for one in _peeled(points)]


def _front(count: int, size: int, power: float) -> Any:
    """Return points of the positive part of a sphere, or of one that is bent."""
    found = np.abs(np.random.default_rng(count).normal(size=(count, size)))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)) ** power


def _volume(points: Any, front: Any) -> float:
    found = compute_hypervolume(points, front.max(axis=0) + 0.1 * np.ptp(front, axis=0))
    return float(found)


@pytest.mark.parametrize("power", [0.5, 1, 2], ids=["bent outwards", "sphere", "plane"])
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(("count", "number"), [(60, 1), (60, 10), (60, 59), (200, 20)])
def test_volume_is_nearly_that_of_the_greedy_choice(
    count: int, number: int, size: int, power: float
) -> None:
    front = _front(count, size, power)
    chosen = spread(front, number)
    assert len(set(chosen)) == number
    worst = front.max(axis=0) + 0.1 * np.ptp(front, axis=0)
    greedy = _volume(front[_solve_hssp(front, np.arange(count), number, worst)], front)
    assert _volume(front[chosen], front) > 0.97 * greedy


def test_all_of_a_front() -> None:
    """Also where more are chosen than sample points can tell apart."""
    front = _front(3000, 3, 1)
    assert sorted(spread(front, 3000)) == list(range(3000))
    assert _volume(front[spread(front, 600)], front) > 0.97 * _volume(front, front)


def test_equal_points_are_chosen_after_others() -> None:
    front = np.eye(3)[[0, 1, 2, *[0] * 50]]
    assert set(spread(front, 3)) == {0, 1, 2}


def test_units_of_a_coordinate_do_not_matter() -> None:
    front = _front(200, 3, 1)
    chosen = spread(front, 20).tolist()
    assert spread(front * [1, 1024, 2**-20], 20).tolist() == chosen
    assert spread(front * [1, 1024, 2**-20], 40)[:20].tolist() == chosen


@pytest.mark.parametrize("number", [0, 1, 5, 12])
@pytest.mark.parametrize(
    "front",
    [
        [[0.5, 0.5, 0.5]] * 12,
        [[-1.7e308, 1.7e308, 0.0], [1.7e308, -1.7e308, 0.0], [0.0, 0.0, 0.0]] * 4,
        [[0.0, math.inf, one] for one in range(12)],
        [[-math.inf, math.inf, one] for one in range(12)],
        np.eye(12).tolist(),  # in twelve coordinates, hardly a sample point is dominated
    ],
    ids=["equal", "extreme", "infinite", "of both signs", "many coordinates"],
)
def test_so_many_of_any_front(front: list[list[float]], number: int) -> None:
    assert len(set(spread(np.array(front), number))) == number
    assert len(spread(np.array(front), number)) == number
