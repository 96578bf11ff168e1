"""Functional analysis of variance: how much of a result's variance each parameter explains.

What must not live here: which results, and how a parameter is placed on its scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_FITS = ((3, 3), (2, 3), (2, 2))
"""Degrees of the polynomials and the least trials for each coefficient: the first that fits."""
_UNCLEAR = 0.05, 0.5
"""An interval from below the first to above the second says nothing of a share."""
_MOST_CROSSED = 8
"""Interactions are estimated among so many parameters, those with the largest effects alone."""
_MOST_OPTIONS = 8


@dataclass(frozen=True)
class Share:
    """A share of the variance, from 0 to 1, with its interval of 95 %."""

    value: float
    low: float
    high: float
    chance: float
    """The probability of such coefficients if the share were 0 (F test)."""

    @property
    def is_known(self) -> bool:
        """Whether the interval says anything: not from nothing to more than half."""
        return self.low > _UNCLEAR[0] or self.high < _UNCLEAR[1]

    @property
    def is_clear(self) -> bool:
        """Whether the share is known, and surely above 0."""
        return self.is_known and self.low > 0


@dataclass(frozen=True)
class VarianceShares:
    """How the variance of a result divides among parameters."""

    shares: Mapping[str, Share]
    """What each parameter explains, alone and with half of what it explains only together with
    another one; the largest first. They add up to what all explain."""
    pairs: Mapping[tuple[str, str], Share]
    """What two parameters explain only together; the largest first."""
    explained: float
    """What all of them explain, corrected for the number of coefficients."""
    num_trials: int


def variance_shares(
    places: Mapping[str, Sequence[float | str | None]], values: Sequence[float]
) -> VarianceShares | None:
    """Divide the variance of a result among parameters and pairs of them.

    This is functional ANOVA (Hoeffding, "A class of statistics with asymptotically normal
    distribution", 1948; for hyperparameters: Hutter, Hoos and Leyton-Brown, "An efficient approach
    for assessing hyperparameter importance", ICML 2014). The function is a polynomial chaos
    expansion (Sudret, "Global sensitivity analysis using polynomial chaos expansions", Reliability
    Engineering and System Safety 93, 2008): polynomials that are orthogonal on the whole range.
    The shares follow from its coefficients without integration, and trials that a sampler crowded
    in one place do not decide alone. Hutter et al. use a random forest, which needs more trials
    and gives a parameter without effect a share, too. The result is replaced by its normal scores
    (van der Waerden, 1952): one diverged trial would outweigh all others.

    A share is the sum of squares of its coefficients, less what chance adds to it; what two
    parameters explain only together belongs to each by half (the Shapley value: Owen, "Sobol'
    indices and Shapley value", SIAM/ASA Journal on Uncertainty Quantification 2, 2014). The
    intervals are those of a quadratic form in normal variables, by its mean and variance.
    """
    import numpy

    count = len(values)
    for degree, per_column in _FITS:
        columns = _all_columns(places, degree)
        width = sum(one.shape[1] for one in columns.values())
        if count >= per_column * (width + 1):
            break
    else:
        return None
    if not columns or len(set(values)) < 3:
        return None
    scores = _normal_scores(values)
    pairs = _pairs(columns, scores, room=count // per_column - width - 1)
    parts: list[tuple[tuple[str, ...], Array]] = [((key,), one) for key, one in columns.items()]
    parts += [(pair, columns[pair[0]][:, :1] * columns[pair[1]][:, :1]) for pair in pairs]
    design = numpy.hstack([numpy.ones((count, 1)), *(one for _, one in parts)])
    fit = _Fit.of(design, scores, [name for name, one in parts for _ in range(one.shape[1])])
    shares = {
        key: fit.share([1 / len(owner) if key in owner else 0.0 for owner in fit.owners])
        for key in columns
    }
    together = {pair: fit.share([float(owner == pair) for owner in fit.owners]) for pair in pairs}
    return VarianceShares(_descending(shares), _descending(together), fit.explained, count)


def least_count(places: Mapping[str, Sequence[float | str | None]]) -> int:
    """Return how many results `variance_shares` needs for these parameters."""
    degree, per_column = _FITS[-1]
    columns = _all_columns(places, degree)
    return per_column * (1 + sum(int(one.shape[1]) for one in columns.values()))


@dataclass(frozen=True)
class _Fit:
    """Coefficients of orthogonal functions, without the constant."""

    owners: Sequence[tuple[str, ...]]
    """To which part each coefficient belongs."""
    coefficients: Array
    covariance: Array
    variance: float
    """That of the whole result, over the whole space, with noise."""
    explained: float
    freedom: int
    """Of the noise."""

    @classmethod
    def of(cls, design: Array, scores: Array, owners: Sequence[tuple[str, ...]]) -> _Fit:
        import numpy

        inverse = numpy.linalg.pinv(design.T @ design)
        solution = inverse @ design.T @ scores
        free = max(1, len(scores) - int(numpy.linalg.matrix_rank(design)))
        noise = float(numpy.sum((scores - design @ solution) ** 2)) / free
        covariance = noise * inverse[1:, 1:]
        signal = float(numpy.sum(solution[1:] ** 2) - numpy.trace(covariance))
        whole = max(signal, 0.0) + noise
        explained = 1 - noise / float(numpy.var(scores, ddof=1))
        return cls(owners, solution[1:], covariance, whole, max(0.0, float(explained)), free)

    def share(self, weights: Sequence[float]) -> Share:
        """Return the share of the coefficients, each by its weight."""
        import numpy
        from scipy.special import fdtrc

        mine = numpy.flatnonzero(weights)
        weight = numpy.array(weights)[mine]
        found, spread = self.coefficients[mine], self.covariance[numpy.ix_(mine, mine)]
        weighted = weight[:, None] * spread
        square = float(found @ (weight * found) - numpy.trace(weighted))
        known = max(0.0, float((weight * found) @ spread @ (weight * found)))
        error = math.sqrt(2 * float(numpy.sum(weighted * weighted.T)) + 4 * known)
        value, half = square / self.variance, 1.96 * error / self.variance
        low, middle, high = (
            float(min(max(x, 0.0), 1.0)) for x in (value - half, value, value + half)
        )
        statistic = max(0.0, float(found @ numpy.linalg.pinv(spread) @ found))
        chance = fdtrc(len(mine), self.freedom, statistic / len(mine))
        return Share(middle, low, high, float(chance))


_Name = TypeVar("_Name")


def _descending(shares: Mapping[_Name, Share]) -> dict[_Name, Share]:
    return dict(sorted(shares.items(), key=lambda item: -item[1].value))


def _all_columns(
    places: Mapping[str, Sequence[float | str | None]], degree: int
) -> dict[str, Array]:
    known = {key: _columns(one, degree) for key, one in places.items()}
    return {key: one for key, one in known.items() if one is not None}


def _columns(places: Sequence[float | str | None], degree: int) -> Array | None:
    """Return functions of a parameter that are orthogonal over its range, with variance 1.

    None for a parameter with a single value, or with too many options.
    """
    import numpy

    having = [place is not None for place in places]
    present = [place for place in places if place is not None]
    options = sorted({place for place in present if isinstance(place, str)})
    if options:
        if not 1 < len(options) <= _MOST_OPTIONS:
            return None
        basis = _contrasts(len(options))
        index = {option: number for number, option in enumerate(options)}
        nothing = numpy.zeros(len(options) - 1)
        found = numpy.array([basis[index[str(p)]] if p is not None else nothing for p in places])
    else:
        numbers = [float(place) for place in present]
        degree = min(degree, len(set(numbers)) - 1)
        if degree < 1:
            return None
        x = numpy.array([2 * float(p) - 1 if p is not None else 0.0 for p in places])
        found = numpy.stack(
            [
                math.sqrt(2 * n + 1) * numpy.polynomial.legendre.legval(x, [0.0] * n + [1.0])
                for n in range(1, degree + 1)
            ],
            axis=1,
        )
    if all(having):
        return found
    mask = numpy.array(having, float)[:, None]
    share = float(mask.mean())
    # Having the parameter at all may have an effect, too.
    return numpy.hstack([found * mask, (mask - share) / math.sqrt(share * (1 - share))])


def _contrasts(count: int) -> Array:
    """Return a row for each option: orthogonal columns with mean 0 and variance 1."""
    import numpy

    basis, _ = numpy.linalg.qr(numpy.hstack([numpy.ones((count, 1)), numpy.eye(count)[:, :-1]]))
    found: Array = basis[:, 1:] * math.sqrt(count)
    return found


def _normal_scores(values: Sequence[float]) -> Array:
    import numpy

    ascending = numpy.sort(values)
    before, through = (numpy.searchsorted(ascending, values, side) for side in ("left", "right"))
    normal, count = NormalDist(), len(values)
    return numpy.array([normal.inv_cdf(rank / 2 / count) for rank in before + through])


def _pairs(columns: Mapping[str, Array], scores: Array, room: int) -> list[tuple[str, str]]:
    """Return the pairs whose interaction is estimated: at most `room`, of the strongest ones."""
    import numpy

    def strength(key: str) -> float:
        one = columns[key]
        return float(numpy.sum((one.T @ (scores - scores.mean())) ** 2) / one.shape[1])

    strongest = sorted(columns, key=strength, reverse=True)[:_MOST_CROSSED]
    found = sorted(
        itertools.combinations(strongest, 2),
        key=lambda pair: strongest.index(pair[0]) + strongest.index(pair[1]),
    )
    return found[: max(0, room)]
