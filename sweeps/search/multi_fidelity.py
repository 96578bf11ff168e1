"""Make trials of different lengths comparable for a sampler that ranks them.

Optuna ranks every complete trial before every pruned one, whatever their values, and pruned trials
by their length. Under early stopping such a rank depends more on when a trial started than on its
quality. What must not live here: trials of an edited search space (`shown_trials`), and stopping
trials.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from optuna.trial import FrozenTrial, TrialState

from sweeps.config.sections import Select
from sweeps.early_stopping.metric_values import Value, all_values
from sweeps.ledger.attributes import compared_values
from sweeps.ledger.ranking import value_of


def enough_at_a_rung(parameters: int) -> int:
    """Return how many trials at a rung a model of its values needs.

    The number is N_min + 2 of Falkner et al., "BOHB" (2018), with N_min = d + 1.

    Args:
        parameters: The number d of parameters.
    """
    return parameters + 3


def project_to_rung(
    trials: Sequence[FrozenTrial],
    rungs: Sequence[int],
    *,
    startup: int,
    enough: int,
    minimize: bool,
    select: Select = "checkpoint",
) -> list[FrozenTrial]:
    """Return trials as they were at one rung, the highest that enough of them have reached.

    Falkner et al., "BOHB" (2018), choose the budget to model in the same way. A trial that has
    reached the rung becomes a complete one with the value that it had there, even if it still
    trains. A trial that ended before remains pruned and so ranks lower.

    Args:
        trials: The trials that a sampler would otherwise receive.
        rungs: Epochs, ascending.
        startup: While fewer trials have ended with a result, all are returned unchanged.
        enough: How many trials must have reached the rung, at least 1.
        minimize: Whether less is better.
        select: What the value of a trial is: its best one up to the rung, or that at the rung.
    """
    ended = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)
    reached = [_epoch_reached(trial) for trial in trials]
    ascending = sorted(reached)
    high = [rung for rung in rungs if len(reached) - bisect_left(ascending, rung) >= enough]
    if ended < startup or not high:
        return list(trials)
    return [
        _as_complete(trial, high[-1], minimize=minimize, select=select)
        if epoch >= high[-1]
        else trial
        for trial, epoch in zip(trials, reached, strict=True)
    ]


def _epoch_reached(trial: FrozenTrial) -> float:
    """Return the epoch that a trial has reached; a complete trial has reached every epoch."""
    if trial.state == TrialState.COMPLETE:
        return math.inf
    if trial.state == TrialState.FAIL:
        return 0
    return max(trial.intermediate_values or _reports(trial), default=0)


def _reports(trial: FrozenTrial) -> Mapping[int, Value]:
    return compared_values(trial.user_attrs, trial.intermediate_values)


def _as_complete(trial: FrozenTrial, rung: int, *, minimize: bool, select: Select) -> FrozenTrial:
    so_far = {e: all_values(value) for e, value in _reports(trial).items() if e <= rung}
    values = value_of(so_far, minimize=minimize, select=select)
    if values is None:
        return trial  # no value is finite
    shown = copy.copy(trial)
    shown.state, shown.values = TrialState.COMPLETE, list(values)
    shown.datetime_complete = trial.datetime_complete or trial.datetime_start
    return shown
