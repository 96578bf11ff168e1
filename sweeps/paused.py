"""What a sampler is shown of trials that pause: a result, as it would be of trials that were
stopped.

To Optuna a paused trial is a running one, and what samplers learn from has ended: of a sweep whose
trials pause, all but the promoted would teach them nothing, and most sweeps would never get past
`startup_trials`. What must not live here: deciding which trials pause (`halving`), and the ledger.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from sweeps.halving import Ladder


class ShownAsStopped(BaseSampler):
    """A sampler that takes every unfinished trial whose last report is a rung's for a pruned one.

    Args:
        sampler: What suggests.
        ladder: The rungs.
    """

    def __init__(self, sampler: BaseSampler, ladder: Ladder) -> None:
        self._sampler = sampler
        self._ladder = ladder

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._sampler.infer_relative_search_space(self._shown(study), trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler.sample_relative(self._shown(study), trial, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        shown = self._shown(study)
        return self._sampler.sample_independent(shown, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._sampler.before_trial(study, trial)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        self._sampler.after_trial(study, trial, state, values)

    def _shown(self, study: optuna.Study) -> optuna.Study:
        return _Shown(study, self._ladder)


class _Shown(optuna.Study):
    """A study in which paused trials are pruned ones. Samplers write to its storage, so it is the
    same; a copy of the trials in another storage would not do.
    """

    def __init__(self, study: optuna.Study, ladder: Ladder) -> None:
        super().__init__(study.study_name, study._storage, study.sampler)
        self._ladder = ladder

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        trials = super()._get_trials(deepcopy=deepcopy, use_cache=use_cache)
        shown = [self._as_stopped(trial) for trial in trials]
        return [trial for trial in shown if states is None or trial.state in states]

    def _as_stopped(self, trial: FrozenTrial) -> FrozenTrial:
        if trial.state.is_finished() or not self._ladder.pauses_at(trial.intermediate_values):
            return trial
        stopped = copy.copy(trial)
        stopped.state, stopped.datetime_complete = TrialState.PRUNED, trial.datetime_start
        return stopped
