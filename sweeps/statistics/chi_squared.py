"""The chi-squared distribution, without SciPy, whose import takes longer than a command may.

What must not live here: tests that use it.
"""

from __future__ import annotations

import math


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """Return the probability that a chi-squared variable exceeds `statistic`.

    Args:
        statistic: At least 0.
        freedom: The degrees of freedom, a whole number.
    """
    half = statistic / 2
    if half == 0:
        return 1.0
    odd = freedom % 2
    tail = math.erfc(math.sqrt(half)) if odd else 0.0
    powers = (i + odd / 2 for i in range(freedom // 2))
    return tail + sum(math.exp(-half + p * math.log(half) - math.lgamma(p + 1)) for p in powers)
