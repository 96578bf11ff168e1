"""The model of PB2: which hyperparameters improve members of a population most, and when.

The method follows Parker-Holder et al., "Provably Efficient Online Hyperparameter Optimization
with Population-Based Bandits" (2020). A Gaussian process over time and hyperparameters is fitted
to the gain of each member from one report to the next. The model chooses the point with the
highest upper confidence bound. What must not live here: which members copy (`explore`), and the
ledger.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from sweeps.config.search_space import SearchSpace, mutable
from sweeps.config.space import Choice, Distribution, LogInt, LogUniform, is_number
from sweeps.ledger.trials import TrialRecord

Matrix = npt.NDArray[np.float64]

_FEWEST = 3  # gains needed for a fit
_CANDIDATES = 512
_CAUTION = 2.0  # standard deviations above the mean in the confidence bound


class PopulationBasedBandits:
    """A model of what each numeric hyperparameter gained the population up to a rung.

    Args:
        space: The search space.
        members: All members by number, with their reports.
        epoch: The rung.
        minimize: Whether less is better.
    """

    def __init__(
        self,
        space: SearchSpace,
        members: Mapping[int, TrialRecord],
        epoch: int,
        *,
        minimize: bool,
    ) -> None:
        self._space, self._epoch = space, epoch
        self._keys = [
            key
            for key in mutable(space)
            if not isinstance(space.distributions[key], Choice)
            and not space.distributions[key].when
        ]
        self._points: list[list[float]] = []
        self._gains: list[float] = []
        for member in members.values():
            self._learn(member, members, -1.0 if minimize else 1.0)
        # Without the scale, the square of the loss of a diverged trial would be infinite.
        largest = max(map(abs, self._gains), default=0.0) or 1.0
        self._gains = [gain / largest for gain in self._gains]

    def choose(
        self,
        params: dict[str, Any],
        *,
        seed: int,
        fits: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    ) -> dict[str, Any]:
        """Return parameters whose numbers the model chooses.

        The model then counts the choice as tried, with the gain that it expects. So the next
        choice at the same rung lies elsewhere.

        Args:
            params: The parameters of the member. They are returned unchanged while there are too
                few gains, or where no candidate is allowed.
            seed: The seed that draws the candidates.
            fits: Whether a trial can be configured with the parameters.
        """
        if len(self._gains) < _FEWEST or not self._keys:
            return params
        random = Random(seed)
        drawn = [self._drawn(params, random) for _ in range(_CANDIDATES)]
        allowed = [point for point in drawn if self._space.allows(point)]
        if not allowed:
            return params
        rows = np.array([self._row(point, self._epoch) for point in allowed])
        mean, deviation = self._predict(rows)
        ranked = np.argsort(-(mean + _CAUTION * deviation), kind="stable")
        best: int | None = next((index for index in ranked if fits(allowed[index])), None)
        if best is None:
            return params
        self._points.append(list(rows[best]))
        self._gains.append(float(mean[best]))
        return allowed[best]

    def _learn(self, member: TrialRecord, members: Mapping[int, TrialRecord], sign: float) -> None:
        donors = {one.epoch: members.get(one.donor) for one in member.lineage}
        epochs = sorted(epoch for epoch in member.reports if epoch <= self._epoch)
        for before, after in itertools.pairwise(epochs):
            owner = donors.get(before, member)  # whose weights the member had
            if owner is None:
                continue  # the donor is not among the members: the gain is unknown
            start = owner.reports[before]
            gain = sign * (member.reports[after] - start)
            params = member.params_at(after)
            if math.isfinite(gain) and all(is_number(params.get(key)) for key in self._keys):
                self._points.append(self._row(params, before))
                self._gains.append(gain)

    def _drawn(self, params: dict[str, Any], random: Random) -> dict[str, Any]:
        """Return `params` with new random numbers."""
        space = self._space.distributions
        return {**params, **{key: space[key].at(random.random()) for key in self._keys}}

    def _row(self, params: Mapping[str, Any], epoch: int) -> list[float]:
        """Return a row of the model: time and numbers, each scaled to 0 to 1."""
        space = self._space.distributions
        return [epoch / self._epoch, *(_share(params[key], space[key]) for key in self._keys)]

    def _predict(self, rows: Matrix) -> tuple[Matrix, Matrix]:
        """Return mean and standard deviation of the gain at each row."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, WhiteKernel

        kernel = RBF(np.ones(rows.shape[1]), (0.05, 10.0)) + WhiteKernel(0.1, (1e-4, 1.0))
        model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a length scale at its bound is valid
            model.fit(np.array(self._points), np.array(self._gains))
            mean, deviation = model.predict(rows, return_std=True)
        return mean, deviation


def _share(value: float, distribution: Distribution) -> float:
    """Return the position of a number between the bounds of its distribution, from 0 to 1."""
    low, high = distribution.arguments()[:2]
    value = min(max(value, low), high)  # the user may have edited the space since
    if low == high:
        return 0.0
    if isinstance(distribution, LogUniform | LogInt):
        return math.log(value / low) / math.log(high / low)
    return float((value - low) / (high - low))
