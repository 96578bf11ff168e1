"""Intervals and chances for counts.

What must not live here: what is counted.
"""

from __future__ import annotations

import math
from statistics import NormalDist


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
    if hits <= 0:
        return 1.0
    if not 0 < probability < 1:
        return float(probability == 1 and hits <= count)
    yes, no = math.log(probability), math.log1p(-probability)
    logs = (_log_comb(count, k) + k * yes + (count - k) * no for k in range(hits, count + 1))
    return min(1.0, sum(map(math.exp, logs)))


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
