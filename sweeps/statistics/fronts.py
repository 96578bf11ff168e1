"""Fronts of points with several coordinates, and which points of a front to choose.

A point dominates another if it is at most as large in every coordinate and less in one. Points
that no other dominates are front 0; without them, the next such points are front 1, and so on.
What must not live here: trials, and which metrics are minimized.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.intp]

_SAMPLES = 2**13
"""How many points of the space stand for its volume, at most."""
_CELLS = 2**22
"""How many pairs of such a point and a point of the front are compared, at most: 4 MB."""


def fronts(points: npt.ArrayLike) -> Iterator[_Indices]:
    """Yield which points are on each front, ascending.

    Each pair is compared once, which takes a byte: 1 MB for a thousand points.
    """
    columns = np.asarray(points, dtype=float).T
    no_worse = np.ones((columns.shape[1],) * 2, dtype=bool)
    for column in columns:
        no_worse &= column[:, np.newaxis] <= column
    dominates = no_worse & ~no_worse.T
    num_better = dominates.sum(axis=0)
    while (front := np.flatnonzero(num_better == 0)).size:
        yield front
        num_better -= dominates[front].sum(axis=0)
        num_better[front] = -1


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
