"""How trials that were trained for different lengths are shown to a sampler that ranks them.

Optuna ranks every complete trial before every pruned one, whatever their values, and pruned ones
by how far they came. Under early stopping that tells when a trial came more than how good it is.
What must not live here: restating trials in a space that was edited (`proposals`), stopping them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from sweeps.ledger.reader import best_report


def enough_at_a_rung(parameters: int) -> int:
    """Return how many trials must have come to a rung for a model of so many parameters there:
    N_min + 2 of BOHB (2018), with N_min = d + 1.
    """
    return parameters + 3


def project_to_rung(
    trials: Sequence[FrozenTrial],
    rungs: Sequence[int],
    *,
    startup: int,
    enough: int,
    minimize: bool,
) -> list[FrozenTrial]:
    """Return trials as they were at one rung, the highest that enough of them have reached.

    So Falkner et al., "BOHB" (2018), choose the budget whose values are modelled. Who has reached
    the rung is shown as complete with its best value by then, also while it is trained further;
    who ended before stays pruned, and thus ranks behind.

    Args:
        trials: What a sampler would be shown.
        rungs: Epochs, ascending.
        startup: As long as fewer trials have ended with a result, all are returned as they are.
        enough: A number of trials, at least 1.
        minimize: Whether less is better.
    """
    ended = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)
    came_to = [_came_to(trial) for trial in trials]
    high = [rung for rung in rungs if sum(epoch >= rung for epoch in came_to) >= enough]
    if ended < startup or not high:
        return list(trials)
    return [
        _as_complete(trial, high[-1], minimize=minimize) if epoch >= high[-1] else trial
        for trial, epoch in zip(trials, came_to, strict=True)
    ]


def _came_to(trial: FrozenTrial) -> float:
    """Return the epoch that a trial has reached; one that trained to its end has reached all."""
    if trial.state == TrialState.COMPLETE:
        return math.inf
    return 0 if trial.state == TrialState.FAIL else max(trial.intermediate_values, default=0)


def _as_complete(trial: FrozenTrial, rung: int, *, minimize: bool) -> FrozenTrial:
    so_far = [value for epoch, value in trial.intermediate_values.items() if epoch <= rung]
    value = best_report(so_far, minimize=minimize)
    if value is None:
        return trial  # nothing finite
    shown = copy.copy(trial)
    shown.state, shown.value = TrialState.COMPLETE, value
    shown.datetime_complete = trial.datetime_complete or trial.datetime_start
    return shown
