"""The model of PB2: which hyperparameters let members of a population improve most, and when.

After Parker-Holder et al., "Provably Efficient Online Hyperparameter Optimization with
Population-Based Bandits" (2020): a Gaussian process over time and hyperparameters is fitted to
what each member gained from one report to the next, and the point with the highest upper
confidence bound is taken. What must not live here: who is replaced (`population`), and the
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
from sweeps.ledger.reader import TrialRecord

Matrix = npt.NDArray[np.float64]

_FEWEST = 3  # gains before there is anything to fit
_CANDIDATES = 512
_CAUTION = 2.0  # standard deviations above the mean


class PopulationBasedBandits:
    """What a population has learned of its numeric hyperparameters by a rung.

    Args:
        space: The search space.
        members: All of them by number, with their curves.
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
        # The square of what a diverged metric of 64 bits loses would be infinite.
        largest = max(map(abs, self._gains), default=0.0) or 1.0
        self._gains = [gain / largest for gain in self._gains]

    def choose(
        self,
        params: dict[str, Any],
        *,
        seed: int,
        fits: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    ) -> dict[str, Any]:
        """Return parameters with the numeric ones chosen by the model; `params` as they are while
        there is too little to learn from, or where no choice is allowed or `fits`.

        The choice counts as tried from now on, with the gain that the model expects of it, so that
        the next one of the same rung looks elsewhere.
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
            owner = donors.get(before, member)  # with whose weights it began
            if owner is None:
                continue  # of one that is out of the running: what was gained is not known
            began = owner.reports[before]
            gain = sign * (member.reports[after] - began)
            params = member.params_at(after)
            if math.isfinite(gain) and all(is_number(params.get(key)) for key in self._keys):
                self._points.append(self._row(params, before))
                self._gains.append(gain)

    def _drawn(self, params: dict[str, Any], random: Random) -> dict[str, Any]:
        """Return `params` with the numbers drawn anew."""
        space = self._space.distributions
        return {**params, **{key: space[key].at(random.random()) for key in self._keys}}

    def _row(self, params: Mapping[str, Any], epoch: int) -> list[float]:
        """Return a point of the model: time and numbers, each from 0 to 1 so far."""
        space = self._space.distributions
        return [epoch / self._epoch, *(_share(params[key], space[key]) for key in self._keys)]

    def _predict(self, rows: Matrix) -> tuple[Matrix, Matrix]:
        """Return mean and standard deviation of the gain at each row."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, WhiteKernel

        kernel = RBF(np.ones(rows.shape[1]), (0.05, 10.0)) + WhiteKernel(0.1, (1e-4, 1.0))
        model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a length at the end of its range is an answer, too
            model.fit(np.array(self._points), np.array(self._gains))
            mean, deviation = model.predict(rows, return_std=True)
        return mean, deviation


def _share(value: float, distribution: Distribution) -> float:
    """Return where a number lies between the ends of its distribution, from 0 to 1."""
    low, high = distribution.arguments()[:2]
    value = min(max(value, low), high)  # one of a space that was edited since
    if low == high:
        return 0.0
    if isinstance(distribution, LogUniform | LogInt):
        return math.log(value / low) / math.log(high / low)
    return float((value - low) / (high - low))
