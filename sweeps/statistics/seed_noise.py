"""The noise of training: how much the value of one configuration differs between seeds.

What must not live here: which of several configurations is the best (`race`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev, variance
from typing import NamedTuple


class SeedNoise(NamedTuple):
    """The standard deviation over seeds, in the unit of the value."""

    deviation: float
    freedom: int
    """Degrees of freedom of the estimate."""
    num_values: int
    num_configurations: int
    quantile: float
    """Student's t, of which 95 % lie between its negative and itself."""


class Difference(NamedTuple):
    """The mean of differences under common seeds, with half the width of its 95 % interval."""

    mean: float
    half_width: float


def seed_noise(values: Sequence[Sequence[float]]) -> SeedNoise | None:
    """Return the standard deviation over seeds, pooled; None if nothing has two seeds.

    The pooled variance weighs each configuration's variance by its degrees of freedom, as in the
    analysis of variance (R. A. Fisher, "Statistical methods for research workers", 1925). It takes
    all configurations to be equally noisy.

    Args:
        values: For each configuration, its values under different seeds.
    """
    several = [one for one in values if len(one) > 1]
    freedom = sum(len(one) - 1 for one in several)
    if not freedom:
        return None
    square = sum((len(one) - 1) * variance(one) for one in several) / freedom
    count = sum(map(len, several))
    return SeedNoise(math.sqrt(square), freedom, count, len(several), _student(freedom))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the mean difference of two configurations under common seeds, with its interval.

    Common seeds cancel what the seeds add to both ("Student", "The probable error of a mean",
    Biometrika 6, 1908, on paired differences; for seeds: Bouthillier et al., "Accounting for
    variance in machine learning benchmarks", MLSys 2021).

    Args:
        first: The values of one, at least two.
        second: Those of the other, in the same order of seeds.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    count = len(differences)
    error = stdev(differences) / math.sqrt(count)
    return Difference(fmean(differences), _student(count - 1) * error)


def _student(freedom: int) -> float:
    """Return the quantile of Student's t at 97.5 %."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))
