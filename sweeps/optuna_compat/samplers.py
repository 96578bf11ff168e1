"""The parts of Optuna's samplers that make suggestions depend on the ledger alone.

A sweep builds a new sampler for each trial, so what a sampler keeps between two trials must be
stored in the trials or given to it. What must not live here: which trials a sampler receives, and
with which arguments it is built (`search`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, QMCSampler
from optuna.samplers._ga import BaseGASampler
from optuna.trial import FrozenTrial, TrialState

_NEAR = 256
"""So many points near the best allowed ones are drawn, in each of these widths of a range."""
_WIDTHS = (0.1, 0.03, 0.01)
_KEPT = 4


def set_trial_id(trial: FrozenTrial, value: int) -> None:
    """Set a trial's id. Samplers need one of each trial, also of a trial in no storage."""
    trial._trial_id = value


def in_generations(trials: Sequence[FrozenTrial], sampler: BaseSampler) -> list[FrozenTrial]:
    """Return trials, of which each complete one has a generation if the sampler counts them.

    NSGA-II sets an attribute for its own suggestions, and sees no trial without it. Others, such
    as those of another sampler, become members of the first generation.
    """
    if not isinstance(sampler, BaseGASampler):
        return list(trials)
    key = sampler._get_generation_key()

    def shown(trial: FrozenTrial) -> FrozenTrial:
        if trial.state != TrialState.COMPLETE or key in trial.system_attrs:
            return trial
        trial = copy.copy(trial)
        trial.system_attrs = {**trial.system_attrs, key: 0}
        return trial

    return [shown(trial) for trial in trials]


def set_trial_attribute(study: optuna.Study, trial: FrozenTrial, key: str, value: Any) -> None:
    """Store a system attribute of a trial, as Optuna's own samplers do.

    `Trial.set_system_attr` is deprecated, and a `FrozenTrial` has no such method.
    """
    study._storage.set_trial_system_attr(trial._trial_id, key, value)


class KernelFit(NamedTuple):
    """The fields that `GPSampler` reads of an earlier fit; each is a tensor."""

    inverse_squared_lengthscales: Any
    kernel_scale: Any
    noise_var: Any


def kernel_fits(sampler: GPSampler) -> list[KernelFit]:
    """Return the last fit for each objective; empty before the first one."""
    return [
        KernelFit(one.inverse_squared_lengthscales, one.kernel_scale, one.noise_var)
        for one in sampler._gprs_cache_list or ()
    ]


def set_kernel_fits(sampler: GPSampler, fits: Sequence[KernelFit]) -> None:
    """Let the next fit start from earlier ones. Optuna keeps them in the sampler object alone."""
    sampler._gprs_cache_list = cast(Any, list(fits))


class AllowingGPSampler(GPSampler):
    """Suggest the best of the allowed points: Optuna's is mostly where no trial can be."""

    allows: Callable[[Mapping[str, Any]], bool] | None = None
    """Returns whether a point with some of its values may be suggested; None: all of them."""

    def _optimize_acqf(self, acqf: Any, best_params: Any) -> Any:
        found = super()._optimize_acqf(acqf, best_params)
        space, generator, allows = acqf.search_space, self._rng.rng, self.allows
        if allows is None or allows(space.get_unnormalized_param(found)):
            return found

        def allowed(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            return points[[allows(space.get_unnormalized_param(point)) for point in points]]

        best = allowed(space.sample_normalized_params(self._n_preliminary_samples, generator))
        known = np.empty((0, space.dim)) if best_params is None else best_params
        for width in _WIDTHS:
            centers = np.concatenate((best, known))
            if not len(centers):
                break
            near = centers[generator.randint(len(centers), size=_NEAR)]
            columns = space.continuous_indices
            near[:, columns] += width * generator.standard_normal((_NEAR, len(columns)))
            candidates = np.concatenate((best, allowed(near.clip(0.0, 1.0))))
            if len(candidates):
                order = np.argsort(-acqf.eval_acqf_no_grad(candidates), kind="stable")
                best = candidates[order[:_KEPT]]
        return best[0] if len(best) else found


class IndexedQMCSampler(QMCSampler):
    """A sampler that suggests the point of its sequence at `index`, from 0.

    Optuna counts in the study: a driver that dies before it stores the trial would skip an index.
    """

    index: int

    def _find_sample_id(
        self, study: optuna.Study, search_space: dict[str, BaseDistribution]
    ) -> int:
        del study, search_space
        return self.index
