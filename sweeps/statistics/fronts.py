"""Fronts of points with several coordinates, and which points of a front to choose.

A point dominates another if it is at most as large in every coordinate and less in one. Points
that no other dominates are front 0; without them, the next such points are front 1, and so on.
What must not live here: trials, and which metrics are minimized.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.intp]

_SAMPLES = 2**13
"""How many points of the space stand for its volume, at most."""
_CELLS = 2**22
"""How many pairs of such a point and a point of the front are compared, at most: 4 MB."""


class Fronts:
    """The fronts of points, kept up to date while points are added.

    A new point pushes the points that it dominates to the next front, and these push others: Li et
    al., "Efficient Nondomination Level Update Method for Steady-State Evolutionary Multiobjective
    Optimization" (2017).
    """

    def __init__(self, num_coordinates: int) -> None:
        self._size = 0
        self._columns = np.empty((num_coordinates, 8))
        self._ranks = np.empty(8, dtype=np.intp)

    @property
    def points(self) -> _Floats:
        """The points in the order in which they were added, of shape (points, coordinates)."""
        return self._columns[:, : self._size].T

    @property
    def ranks(self) -> _Indices:
        """The front of each point, in the same order, of shape (points,)."""
        return self._ranks[: self._size]

    def front(self, index: int) -> _Indices:
        """Return which points are on a front, in the order in which they were added."""
        return np.flatnonzero(self.ranks == index)

    def dominating(self, point: npt.ArrayLike) -> _Indices:
        """Return which points dominate another one, in the order in which they were added."""
        points, other = self.points, np.asarray(point, dtype=float)
        return np.flatnonzero((points <= other).all(axis=1) & (points != other).any(axis=1))

    def add(self, point: npt.ArrayLike) -> int:
        """Add a point, and return the index of its front."""
        mine = np.asarray(point, dtype=float)[:, np.newaxis]
        known, ranks = self._columns[:, : self._size], self.ranks
        no_less, no_more = (known <= mine).all(axis=0), (known >= mine).all(axis=0)
        rank = int(ranks[no_less & ~no_more].max(initial=-1)) + 1
        worse = np.flatnonzero(no_more & ~no_less)
        moved, pushed, front = [], mine, rank
        while pushed.size:
            there = worse[ranks[worse] == front]
            there = there[_some_dominates(pushed, known[:, there])]
            if len(there) == np.count_nonzero(ranks == front):
                # A whole front is pushed. Each point behind it is dominated by one of it.
                moved.append(np.flatnonzero(ranks >= front))
                break
            moved.append(there)
            pushed, front = known[:, there], front + 1
        ranks[np.concatenate(moved)] += 1
        self._append(mine[:, 0], rank)
        return rank

    def _append(self, point: _Floats, rank: int) -> None:
        if self._size == len(self._ranks):
            self._columns = np.concatenate((self._columns, np.empty_like(self._columns)), axis=1)
            self._ranks = np.concatenate((self._ranks, np.empty_like(self._ranks)))
        self._columns[:, self._size], self._ranks[self._size] = point, rank
        self._size += 1


def _some_dominates(columns: _Floats, others: _Floats) -> npt.NDArray[np.bool_]:
    """Return which of the others are dominated; none equals one of the points."""
    found = np.ones((columns.shape[1], others.shape[1]), dtype=bool)
    for mine, theirs in zip(columns, others, strict=True):
        found &= mine[:, np.newaxis] <= theirs
    return np.asarray(found.any(axis=0))


def spread(front: _Floats, number: int) -> _Indices:
    """Choose points of a front that together dominate a large volume.

    Each next point is the one that adds most to the volume that the chosen ones dominate: the
    greedy choice of Guerreiro, Fonseca and Paquete, "Greedy Hypervolume Subset Selection in Low
    Dimensions" (2016), with volumes estimated from sample points as by Bader and Zitzler, "HypE"
    (2011). Once the chosen points dominate all sample points, the rest is drawn from the others,
    in the same way each time. Each coordinate is scaled to its range in the front, and the volume
    ends a tenth of this range behind the worst.
    """
    return _spread(front.tobytes(), front.shape[1], number)


@lru_cache(maxsize=1)  # in a sweep, most trials do not change the front
def _spread(front: bytes, num_coordinates: int, number: int) -> _Indices:
    points = np.frombuffer(front).reshape(-1, num_coordinates)
    points = np.nan_to_num(points) / 2  # finite, and so that no difference overflows
    low = points.min(axis=0)
    span = points.max(axis=0) - low
    scaled = (points - low) / np.where(span > 0, span, 1.0)
    num_samples = min(_SAMPLES, max(1, _CELLS // len(points)))
    samples = 1.1 * _evenly(num_samples, num_coordinates)
    dominates = np.ones((len(samples), len(points)), dtype=bool)
    for column, sampled in zip(scaled.T, samples.T, strict=True):
        dominates &= column <= sampled[:, np.newaxis]
    ones = dominates.view(np.uint8)  # summed in half the time
    gain, is_open = ones.sum(axis=0, dtype=np.int32), np.ones(len(samples), dtype=bool)
    chosen: list[int] = []
    while len(chosen) < number and gain.max() > 0:
        chosen.append(int(gain.argmax()))
        covered = np.flatnonzero(is_open & dominates[:, chosen[-1]])
        gain -= ones[covered].sum(axis=0, dtype=np.int32)
        is_open[covered] = False
    drawn = np.random.default_rng(0).permutation(len(points))
    rest = np.setdiff1d(drawn, chosen, assume_unique=True)[: number - len(chosen)]
    return np.array([*chosen, *rest], dtype=np.intp)


def _evenly(count: int, num_coordinates: int) -> _Floats:
    """Return points that fill the unit cube more evenly than random ones do.

    Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences" (2018).
    """
    root = 2.0
    for _ in range(64):  # root ** (num_coordinates + 1) == root + 1
        root = (1 + root) ** (1 / (num_coordinates + 1))
    steps = root ** -np.arange(1.0, num_coordinates + 1)
    return (0.5 + np.arange(count)[:, np.newaxis] * steps) % 1.0
