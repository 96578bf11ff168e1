"""How far the value of one configuration spreads over seeds, and what that says about means.

What must not live here: which of several configurations is the best (`race.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]

_POOLED_WEIGHT = 4.0
_ZERO = 1e-9


@dataclass(frozen=True)
class NoiseFloor:
    """The standard deviation over seeds of one configuration, pooled over configurations.

    Attributes:
        freedom: The degrees of freedom of `sd`; a fraction, because seeds that all configurations
            share are not new evidence for each of them.
        num_values: From how many values it was estimated.
        num_configurations: From how many configurations with two seeds or more.
    """

    sd: float
    freedom: float
    num_values: int
    num_configurations: int


class Difference(NamedTuple):
    """The mean of differences under common seeds, with half the width of its interval."""

    mean: float
    half_width: float


def table_of(values: Mapping[int, Mapping[int, float]]) -> Array:
    """Return values by configuration and seed as a row for each configuration, NaN for none."""
    seeds = sorted({seed for one in values.values() for seed in one})
    rows = [[one.get(seed, math.nan) for seed in seeds] for one in values.values()]
    return np.array(rows, dtype=float).reshape(len(rows), len(seeds))


def noise_floor(values: Array) -> NoiseFloor | None:
    """Return the standard deviation over seeds of one configuration; None without two seeds.

    The variance is pooled over the configurations. Its degrees of freedom are those of
    Satterthwaite, "An Approximate Distribution of Estimates of Variance Components" (1946), for
    the sum of the variance that a seed brings to all configurations alike, and of the rest.
    """
    known = np.isfinite(values)
    repeated = known.sum(axis=1) > 1
    values, known = values[repeated], known[repeated]
    if not len(values):
        return None
    counts = known.sum(axis=1)
    freedom = float((counts - 1).sum())
    total = float(squares_within(values).sum())
    layout = TwoWayLayout(values)
    shared_freedom = freedom - layout.freedom
    shared = max(total - layout.squares, 0.0)
    effective = freedom
    if total > 0:
        parts = shared**2 / shared_freedom if shared_freedom > 0 else 0.0
        parts += layout.squares**2 / layout.freedom if layout.freedom > 0 else 0.0
        effective = total**2 / parts
    return NoiseFloor(math.sqrt(total / freedom), effective, int(counts.sum()), len(values))


def mean_error(values: Array, noise: NoiseFloor) -> tuple[float, float]:
    """Return the standard error of one configuration's mean, and its degrees of freedom.

    The variance is the moderated one of Smyth, "Linear Models and Empirical Bayes Methods for
    Assessing Differential Expression" (2004), with a fixed weight: the configuration's own, with
    its degrees of freedom, and the pooled one with four more. Own variances alone make intervals
    from two seeds three times as wide; the pooled one alone misses where one configuration is
    noisier than others.
    """
    found = values[np.isfinite(values)]
    freedom = len(found) - 1
    weight = min(_POOLED_WEIGHT, noise.freedom)
    squares = float(squares_within(found[None, :])[0]) + weight * noise.sd**2
    error = math.sqrt(squares / (weight + freedom) / len(found))
    return error, min(weight + freedom, max(noise.freedom, freedom))


def paired_difference(first: Array, second: Array, level: float) -> Difference | None:
    """Return the mean difference of two configurations under common seeds; None without two.

    Common seeds cancel what the seeds add to both ("Student", "The probable error of a mean",
    Biometrika 6, 1908, on paired differences; for seeds: Bouthillier et al., "Accounting for
    variance in machine learning benchmarks", MLSys 2021).
    """
    differences = first - second
    differences = differences[np.isfinite(differences)]
    count = len(differences)
    if count < 2:
        return None
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    return Difference(float(differences.mean()), half_width(error, count - 1, level))


def half_width(error: float, freedom: float, level: float) -> float:
    """Return half the width of the two-sided interval by Student's t distribution."""
    return float(-stdtrit(freedom, level / 2)) * error


def squares_within(values: Array) -> Array:
    """Return for each row the sum of squared distances from its mean, without NaN."""
    known = np.isfinite(values)
    counts = np.maximum(known.sum(axis=1), 1)
    means = np.where(known, values, 0.0).sum(axis=1) / counts
    return np.asarray((np.where(known, values - means[:, None], 0.0) ** 2).sum(axis=1))


class TwoWayLayout:
    """A fit of `mean_i + seed_s` to values of configurations under common seeds.

    The least squares of an unbalanced two-way layout without interaction, with the seeds
    eliminated: Searle, "Linear Models" (1971), chapter 7. Configurations may lack seeds.

    Attributes:
        effects: Of each configuration, what its seeds share taken away; they add up to 0.
        axes: Directions among the effects, one in each column, in which they are uncorrelated.
        information: By axis, how many seeds an effect in its direction is worth; 0 where the
            configurations share no seed.
        squares: The sum of the squared residuals.
        freedom: Of the residuals.
    """

    def __init__(self, values: Array) -> None:
        known = np.isfinite(values)
        filled = np.where(known, values - np.nanmean(values), 0.0)
        incidence = known.astype(float)
        per_seed = np.maximum(incidence.sum(axis=0), 1.0)
        counts = incidence.sum(axis=1)
        matrix = np.diag(counts) - (incidence / per_seed) @ incidence.T
        adjusted = filled.sum(axis=1) - (incidence / per_seed) @ filled.sum(axis=0)
        information, axes = np.linalg.eigh(matrix)
        usable = information > _ZERO * max(counts.max(), 1.0)
        # The direction of the common mean has no information, and no place among the effects.
        self.information: Array = np.where(usable, information, 0.0)
        self.axes: Array = axes
        inverse = np.divide(1.0, information, out=np.zeros_like(information), where=usable)
        self.effects: Array = axes @ (inverse * (axes.T @ adjusted))
        seeds = (filled.sum(axis=0) - incidence.T @ self.effects) / per_seed
        residuals = np.where(known, filled - self.effects[:, None] - seeds, 0.0)
        self.squares = float((residuals**2).sum())
        used_seeds = int((incidence.sum(axis=0) > 0).sum())
        self.freedom = int(known.sum()) - used_seeds - int(usable.sum())
