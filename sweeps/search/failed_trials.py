"""Show samplers the trials that failed because of their parameters as the worst ones.

Samplers of Optuna ignore a failed trial. Where a part of the space always fails, they would
suggest points of it again and again. The ledger keeps such a trial as failed. What must not live
here: which failures parameters may cause (`trial_evidence`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from optuna.samplers import (
    BaseSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIISampler,
    TPESampler,
)
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeps.search.trial_evidence import failed_by_parameters


def failures_as_worst(
    trials: Sequence[FrozenTrial],
    sampler: BaseSampler,
    *,
    startup: int,
    directions: Sequence[StudyDirection],
) -> list[FrozenTrial]:
    """Return trials, with each failure of parameters as a trial that no other is worse than.

    For TPE it is a pruned trial without a report, which ranks behind all others. GP, CMA-ES and
    NSGA-II learn from complete trials alone: for them it has the worst value that one of these
    has, of each metric. Other samplers receive the trials unchanged.

    Args:
        trials: The trials that a sampler would otherwise receive.
        sampler: The sampler.
        startup: While fewer trials have ended with a result, all are returned unchanged.
        directions: The direction of each metric.
    """
    fail = TrialState.FAIL  # looking it up for each trial would take long
    failed = {
        place
        for place, trial in enumerate(trials)
        if trial.state == fail and _is_of_parameters(trial)
    }
    states = _results_of(sampler)
    results = [trial for trial in trials if trial.state in states] if failed else []
    if len(results) < max(1, startup):
        return list(trials)
    worst: list[float] | None = None
    if not isinstance(sampler, TPESampler):
        columns = zip(*(trial.values for trial in results), strict=True)
        worst = [
            max(values) if direction == StudyDirection.MINIMIZE else min(values)
            for values, direction in zip(columns, directions, strict=True)
        ]
    return [
        _as_worst(trial, worst) if place in failed else trial for place, trial in enumerate(trials)
    ]


def _results_of(sampler: BaseSampler) -> tuple[TrialState, ...]:
    """Return the states of the trials that a sampler learns from; none of an unknown sampler."""
    if isinstance(sampler, TPESampler):
        return TrialState.COMPLETE, TrialState.PRUNED
    if isinstance(sampler, GPSampler | CmaEsSampler | NSGAIISampler):
        return (TrialState.COMPLETE,)
    return ()


def _is_of_parameters(failed: FrozenTrial) -> bool:
    # A trial outside the search space is shown as a failed one without parameters.
    return bool(failed.params) and failed_by_parameters(failed)


def _as_worst(trial: FrozenTrial, worst: list[float] | None) -> FrozenTrial:
    shown = copy.copy(trial)
    shown.state = TrialState.PRUNED if worst is None else TrialState.COMPLETE
    shown.values, shown.intermediate_values = worst, {}
    shown.datetime_complete = trial.datetime_complete or trial.datetime_start
    return shown
