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

    Args:
        hits: How often it happened, from 0 to `count`; it need not be whole.
        count: How often it could have happened; at least 1.
        level: The probability that the interval holds the truth.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, square = hits / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def binomial_tail(hits: int, count: int, probability: float) -> float:
    """Return the probability of at least `hits` of `count` independent events."""
    return sum(
        math.comb(count, k) * probability**k * (1 - probability) ** (count - k)
        for k in range(max(0, hits), count + 1)
    )


def hypergeometric_tail(hits: int, drawn: int, marked: int, count: int) -> float:
    """Return the probability that at least `hits` of the drawn ones are marked.

    This is Fisher's exact test, one-sided (R. A. Fisher, "On the interpretation of chi-squared
    from contingency tables", Journal of the Royal Statistical Society 85, 1922).

    Args:
        hits: How many marked ones were drawn.
        drawn: How many were drawn without replacement.
        marked: How many are marked.
        count: How many there are.
    """
    ways = math.comb(count, drawn)
    possible = range(max(hits, drawn + marked - count, 0), min(drawn, marked) + 1)
    return (
        sum(math.comb(marked, k) * math.comb(count - marked, drawn - k) for k in possible) / ways
    )
