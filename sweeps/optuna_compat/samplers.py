"""The parts of Optuna's samplers that make suggestions depend on the ledger alone.

A sweep builds a new sampler for each trial, so what a sampler keeps between two trials must be
stored in the trials or given to it. What must not live here: which trials a sampler receives, and
with which arguments it is built (`search`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import GPSampler, QMCSampler
from optuna.trial import FrozenTrial

FIRST_GENERATION: Mapping[str, int] = {"NSGAIISampler:generation": 0}
"""The system attribute of trials that `NSGAIISampler` takes as its first generation. It sets the
attribute for its own suggestions, and counts no trial without it."""


def set_trial_attribute(study: optuna.Study, trial: FrozenTrial, key: str, value: Any) -> None:
    """Store a system attribute of a trial, as Optuna's own samplers do.

    `Trial.set_system_attr` is deprecated, and a sampler receives a `FrozenTrial`, which has no
    such method.
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


class IndexedQMCSampler(QMCSampler):
    """A sampler that suggests the point of its sequence at `index`, from 0.

    Optuna counts indices in the study. A driver that dies between counting and storing a trial
    would skip an index.
    """

    index: int

    def _find_sample_id(
        self, study: optuna.Study, search_space: dict[str, BaseDistribution]
    ) -> int:
        del study, search_space
        return self.index
