"""The recorded configurations: one scrambled Sobol sequence, the same for all tasks and seeds.

    search: {sampler: tests.bench.curves.points:SobolPoints}

The sampler `qmc` would draw other points for each seed of a sweep. What must not live here: what
is trained (`tasks.py`), and reading (`collect.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial
from scipy.stats import qmc

PARAMETERS = (
    "train.optimizer.lr",
    "train.schedule.warmup",
    "train.clip.max_norm",
    "train.optimizer.weight_decay",
    "train.batch_size",
)
"""In the order of the sequence's dimensions."""
_SCRAMBLING = 39


def unit_points(count: int) -> NDArray[np.float64]:
    """Return the first points of the sequence, one a row, in the unit cube."""
    sequence = qmc.Sobol(len(PARAMETERS), scramble=True, rng=_SCRAMBLING)
    return np.asarray(sequence.random_base2(max(count - 1, 0).bit_length())[:count])


def value_at(place: float, distribution: BaseDistribution) -> float | int:
    """Return the value at a place in [0, 1) of a range, on its own scale."""
    low, high = float(distribution.low), float(distribution.high)  # type: ignore[attr-defined]
    whole = isinstance(distribution, optuna.distributions.IntDistribution)
    if whole:
        low, high = low - 0.5, high + 0.5
    log = bool(distribution.log)  # type: ignore[attr-defined]
    value = low * (high / low) ** place if log else low + (high - low) * place
    return round(value) if whole else value


class SobolPoints(RandomSampler):
    """Suggest the point whose position in the sequence is the number of the trial."""

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return the value of the trial's point."""
        del study
        place = unit_points(trial.number + 1)[-1, PARAMETERS.index(param_name)]
        return value_at(float(place), param_distribution)
