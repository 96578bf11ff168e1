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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from optuna.trial import FrozenTrial, TrialState

from sweeps.config.sections import Select
from sweeps.early_stopping.metric_values import Value, all_values
from sweeps.ledger.attributes import compared_values
from sweeps.ledger.ranking import value_of

_T = TypeVar("_T")
# Python 3.11 takes long to look up a member of an enumeration for each of many trials.
_COMPLETE, _PRUNED, _FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL


def enough_at_a_rung(parameters: int) -> int:
    """Return how many trials at a rung a model of its values needs.

    The number is N_min + 2 of Falkner et al., "BOHB" (2018), with N_min = d + 1.

    Args:
        parameters: The number d of parameters.
    """
    return parameters + 3


class _OfEachTrial(Generic[_T]):
    """Compute something of each of many trials, and again only where a trial is another object.

    Args:
        compute: Computes it.
    """

    def __init__(self, compute: Callable[[FrozenTrial], _T]) -> None:
        self._compute = compute
        self._trials: Sequence[FrozenTrial] = ()
        self._found: list[_T] = []

    def __call__(self, trials: Sequence[FrozenTrial]) -> list[_T]:
        """Return it, in the order of the trials."""
        compute = self._compute
        before = zip(trials, self._trials, self._found, strict=False)
        found = [one if trial is seen else compute(trial) for trial, seen, one in before]
        found += map(compute, trials[len(found) :])
        self._trials, self._found = list(trials), found
        return found


class OneRung:
    """Show trials as they were at one rung, the highest that enough of them have reached.

    Falkner et al., "BOHB" (2018), choose the budget to model in the same way. A trial that has
    reached the rung becomes a complete one with the value that it had there, even if it still
    trains. A trial that ended before remains pruned and so ranks lower.

    Args:
        rungs: Epochs, ascending.
        minimize: Whether less is better.
        select: What the value of a trial is: its best one up to the rung, or that at the rung.
    """

    def __init__(
        self, rungs: Sequence[int], *, minimize: bool, select: Select = "checkpoint"
    ) -> None:
        self._rungs, self._minimize, self._select = rungs, minimize, select
        self._reached = _OfEachTrial(_epoch_reached)
        self._shown = {rung: _OfEachTrial(partial(self._at, rung)) for rung in rungs}

    def show(
        self, trials: Sequence[FrozenTrial], *, startup: int, enough: int
    ) -> list[FrozenTrial]:
        """Return trials as they were at the rung.

        Args:
            trials: The trials that a sampler would otherwise receive.
            startup: While fewer trials have ended with a result, all are returned unchanged.
            enough: How many trials must have reached the rung, at least 1.
        """
        ended = (one for one in trials if one.state in (_COMPLETE, _PRUNED))
        reached = sorted(self._reached(trials))
        high = [
            rung for rung in self._rungs if len(reached) - bisect_left(reached, rung) >= enough
        ]
        if len(list(islice(ended, startup))) < startup or not high:
            return list(trials)
        return self._shown[high[-1]](trials)

    def _at(self, rung: int, trial: FrozenTrial) -> FrozenTrial:
        """Return a trial as it was at a rung; unchanged if it has not reached it."""
        if _epoch_reached(trial) < rung:
            return trial
        so_far = {e: all_values(value) for e, value in _reports(trial).items() if e <= rung}
        values = value_of(so_far, minimize=self._minimize, select=self._select)
        if values is None:
            return trial  # no value is finite
        shown = copy.copy(trial)
        shown.state, shown.values = _COMPLETE, list(values)
        shown.datetime_complete = trial.datetime_complete or trial.datetime_start
        return shown


def _epoch_reached(trial: FrozenTrial) -> float:
    """Return the epoch that a trial has reached; a complete trial has reached every epoch."""
    if trial.state == _COMPLETE:
        return math.inf
    if trial.state == _FAIL:
        return 0
    reports = trial.intermediate_values or _reports(trial)
    return max(reports) if reports else 0


def _reports(trial: FrozenTrial) -> Mapping[int, Value]:
    return compared_values(trial.user_attrs, trial.intermediate_values)
