"""One number, and its standard error, for the values of a configuration under several seeds.

Pure functions of numbers. What must not live here: which trials are the seeds of one configuration
(`sweeps.ledger.over_seeds`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

SeedValue = Literal["mean", "median"]
"""What the value of a configuration is."""
_OF_A_MEDIAN = math.sqrt(math.pi / 2)


def combine(values: Sequence[float], how: SeedValue) -> float:
    """Return the mean or the median; NaN if a value is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.fmean(values) if how == "mean" else float(statistics.median(values))


def standard_error(values: Sequence[float], how: SeedValue) -> float | None:
    """Return the standard error of the mean or the median over seeds; None for fewer than two.

    For the mean it is `s / sqrt(n)`, with the sample standard deviation `s` (divisor n - 1). For
    the median it is larger by `sqrt(pi / 2)`, the factor for many normal values (Cramer,
    "Mathematical Methods of Statistics", 1946, section 28.5). With three seeds both are rough.
    """
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return error if how == "mean" else _OF_A_MEDIAN * error
