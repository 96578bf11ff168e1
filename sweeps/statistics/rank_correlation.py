"""Rank correlation of two measurements of the same things, with an interval.

What must not live here: what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

FEWEST = 8
"""With fewer pairs, the interval's approximation does not hold."""
_MOST = 1000
"""The cost grows with the square of the number of pairs."""


class RankCorrelation(NamedTuple):
    """Kendall's tau with an interval; it has no unit."""

    tau: float
    """From -1 to 1: the pairs in the same order less those in the opposite order, as a share."""
    low: float
    high: float
    num_pairs: int
    """From how many things it is."""


def kendall(
    first: Sequence[float], second: Sequence[float], level: float = 0.95
) -> RankCorrelation | None:
    """Return Kendall's tau-b; None with fewer than `FEWEST` things, or if all are equal.

    tau-b counts ties in neither direction (M. G. Kendall, "The treatment of ties in ranking
    problems", Biometrika 33, 1945). The interval is that of Fieller, Hartley and Pearson, "Tests
    for rank correlation coefficients", Biometrika 44 (1957): the inverse hyperbolic tangent of tau
    is nearly normal with the variance 0.437 / (n - 4).

    Args:
        first: One measurement of each thing; of more than 1000 things, 1000 are used.
        second: The other measurement, in the same order.
        level: The probability that the interval holds the truth.
    """
    import numpy

    step = max(1, math.ceil(len(first) / _MOST))
    x, y = numpy.asarray(first[::step], float), numpy.asarray(second[::step], float)
    count = len(x)
    if count < FEWEST:
        return None
    a, b = (numpy.sign(one[:, None] - one[None, :]) for one in (x, y))
    untied = float(numpy.sum(a * a)) * float(numpy.sum(b * b))
    if untied == 0:
        return None
    tau = float(numpy.sum(a * b)) / math.sqrt(untied)
    z = math.atanh(min(max(tau, -0.9999), 0.9999))
    half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(0.437 / (count - 4))
    return RankCorrelation(tau, math.tanh(z - half), math.tanh(z + half), count)
