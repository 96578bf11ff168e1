"""Optuna's GP sampler with its fitted kernels stored in the trials.

The sampler fits its kernel parameters for each suggestion and starts from the last fit. A new
sampler starts from the defaults, and such a fit often ends at worse parameters. What must not live
here: the model, which is Optuna's.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import GPSampler
from optuna.trial import FrozenTrial

KERNEL = "gradsweep:kernel"
"""The trial attribute with the kernel of each metric.

A kernel is a list: the inverse squared length scales, the kernel scale and the noise variance.
"""


class _Kernel(NamedTuple):
    """The fields that Optuna reads of an earlier fit."""

    inverse_squared_lengthscales: Any
    kernel_scale: Any
    noise_var: Any


class NotingGPSampler(GPSampler):
    """Start each fit from the kernels stored in the newest trial, and store its own in the trial.

    The suggestions then depend on the trials alone, however often the sampler is built.
    """

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Suggest as Optuna's sampler does."""
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
    import torch  # Optuna has imported it by now

    *scales, scale, noise = torch.tensor(values, dtype=torch.float64)
    return _Kernel(torch.stack(scales), scale, noise)
