"""Optuna's GP sampler with its fitted kernels stored in the trials.

The sampler fits its kernel parameters for each suggestion and starts from the last fit. A new
sampler starts from the defaults, and such a fit often ends at worse parameters. What must not live
here: the model, which is Optuna's.
"""

from __future__ import annotations

from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial

from sweeps.optuna_compat.samplers import (
    AllowingGPSampler,
    KernelFit,
    kernel_fits,
    set_kernel_fits,
    set_trial_attribute,
)

KERNEL = "gradsweep:kernel"
"""The trial attribute with the kernel of each metric.

A kernel is a list: the inverse squared length scales, the kernel scale and the noise variance.
"""


class NotingGPSampler(AllowingGPSampler):
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
            set_kernel_fits(self, [_restored(values) for values in noted[-1]])
        suggested = super().sample_relative(study, trial, search_space)
        if fits := kernel_fits(self):
            note = [
                [
                    *one.inverse_squared_lengthscales.tolist(),
                    one.kernel_scale.item(),
                    one.noise_var.item(),
                ]
                for one in fits
            ]
            set_trial_attribute(study, trial, KERNEL, note)
        return suggested


def _restored(values: list[float]) -> KernelFit:
    import torch  # Optuna has imported it by now

    *scales, scale, noise = torch.tensor(values, dtype=torch.float64)
    return KernelFit(torch.stack(scales), scale, noise)
