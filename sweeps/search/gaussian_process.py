"""Optuna's GP sampler, whose memory lies in its trials.

Its kernel's parameters are fitted anew for each suggestion, from where the last fit ended; from
their defaults, as every sampler begins that is built anew, a fit often ends in a worse place. What
must not live here: the model, which is Optuna's.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import GPSampler
from optuna.trial import FrozenTrial

KERNEL = "gradsweep:kernel"
"""A trial's note: of each metric's kernel the inverse squared length scales, its scale and the
variance of the noise.
"""


class _Kernel(NamedTuple):
    """What Optuna reads of an earlier fit."""

    inverse_squared_lengthscales: Any
    kernel_scale: Any
    noise_var: Any


class NotingGPSampler(GPSampler):
    """Begins its fit at what the newest trial has noted, and notes for its own where it ended.

    What it suggests then depends on the trials alone, however often it is built.
    """

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Suggest as Optuna's does; see there."""
        trials = study.get_trials(deepcopy=False)
        noted = [one.system_attrs[KERNEL] for one in trials if KERNEL in one.system_attrs]
        if noted and len(noted[-1]) == len(study.directions):
            self._gprs_cache_list = cast(Any, [_restored(values) for values in noted[-1]])
        suggested = super().sample_relative(study, trial, search_space)
        if self._gprs_cache_list:
            note = [
                [
                    *one.inverse_squared_lengthscales.tolist(),
                    one.kernel_scale.item(),
                    one.noise_var.item(),
                ]
                for one in self._gprs_cache_list
            ]
            study._storage.set_trial_system_attr(trial._trial_id, KERNEL, note)
        return suggested


def _restored(values: list[float]) -> _Kernel:
    import torch  # as Optuna has by now

    *scales, scale, noise = torch.tensor(values, dtype=torch.float64)
    return _Kernel(torch.stack(scales), scale, noise)
