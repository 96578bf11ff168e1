"""Intervals and chances for counts, and of the rank correlation of two measurements.

What must not live here: what is counted or measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple


def wilson_interval(hits: float, count: float, level: float = 0.95) -> tuple[float, float]:
    """Return an interval for a probability by Wilson's score method.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal
    of the American Statistical Association 22 (1927). Unlike the interval of the normal
    approximation, it has nearly its nominal coverage for small counts and near 0 and 1 (Brown, Cai
    and DasGupta, "Interval estimation for a binomial proportion", Statistical Science 16, 2001).
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, square = hits / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def binomial_tail(hits: int, count: int, probability: float) -> float:
    """Return the probability of at least `hits` of `count` independent events."""
    from scipy.special import bdtrc

    if hits <= 0 or hits > count:
        return float(hits <= 0)
    return float(bdtrc(hits - 1, count, probability))


def hypergeometric_tail(hits: int, drawn: int, marked: int, count: int) -> float:
    """Return the probability that at least `hits` of the drawn ones are marked.

    This is Fisher's exact test, one-sided (R. A. Fisher, "On the interpretation of chi-squared
    from contingency tables", Journal of the Royal Statistical Society 85, 1922).
    """
    ways = _log_comb(count, drawn)
    possible = range(max(hits, drawn + marked - count, 0), min(drawn, marked) + 1)
    logs = (_log_comb(marked, k) + _log_comb(count - marked, drawn - k) - ways for k in possible)
    return min(1.0, sum(map(math.exp, logs)))


def _log_comb(count: int, chosen: int) -> float:
    """Return the logarithm of a binomial coefficient; of thousands, no float holds the number."""
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)


FEWEST = 8
"""With fewer things, the interval of 95 % has 0 even if all pairs are in the same order."""
_BOUND_WEIGHT = 2.0
"""For how many things the bound of the variance stands when it is averaged with the estimate."""


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
    problems", Biometrika 33, 1945). Its variance is that of a U-statistic (W. Hoeffding, "A class
    of statistics with asymptotically normal distribution", 1948): `1 - tau^2` times
    `2 (1 + 2 (n - 2) r) / (n (n - 1))`. Here `r` is the variance of a thing's own part of tau,
    divided by `1 - tau^2`; no population has more than 1/2. As few things estimate it badly, that
    bound is averaged with it, with the weight of two things. The interval has all values of tau
    that are as near as the level asks for with *their* variance, as Wilson's has for a share:
    nearly all pairs in one order do not make it too short.
    """
    import numpy

    x, y = numpy.asarray(first, float), numpy.asarray(second, float)
    count = len(x)
    if count < FEWEST:
        return None
    agree, x_untied, y_untied = numpy.empty((3, count))
    for thing in range(count):
        a, b = numpy.sign(x - x[thing]), numpy.sign(y - y[thing])
        agree[thing], x_untied[thing], y_untied[thing] = a @ b, a @ a, b @ b
    untied = math.sqrt(float(x_untied.sum()) * float(y_untied.sum()))
    if untied == 0:
        return None
    tau = float(agree.sum()) / untied
    ties = x_untied / float(x_untied.sum()) + y_untied / float(y_untied.sum())
    own = count * (agree / untied - tau * ties / 2)  # their mean is 0
    ratio = (float(own @ own) + _BOUND_WEIGHT / 2) / (count * (1 - tau**2) + _BOUND_WEIGHT)
    pairs = count * (count - 1)
    z = NormalDist().inv_cdf((1 + level) / 2)
    square = z**2 * 2 * (pairs / untied + 2 * (count - 2) * ratio) / pairs
    half = math.sqrt(square * max(0.0, 1 + square - tau**2))
    low, high = (tau - half) / (1 + square), (tau + half) / (1 + square)
    return RankCorrelation(tau, max(-1.0, low), min(1.0, high), count)
