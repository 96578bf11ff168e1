"""Make trials of different lengths comparable for a sampler that ranks them.

Optuna ranks every complete trial before every pruned one, whatever their values, and pruned trials
by their length. Under early stopping such a rank depends more on when a trial started than on its
quality. What must not live here: what a trial tells (`trial_evidence`), trials of an edited search
space (`shown_trials`), and stopping trials.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from optuna.trial import FrozenTrial, TrialState

from sweeps.config.sections import Select
from sweeps.ledger.ranking import is_finite
from sweeps.search.trial_evidence import CUT_OFF, as_failed, telling_nothing, values_at

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


class OfEachTrial(Generic[_T]):
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
    trains. A trial that was stopped before remains pruned and so ranks lower. One that was cut off
    before tells nothing. One whose value there is not finite is a failure of its parameters.

    Args:
        rungs: Epochs, ascending; none: trials are not compared at rungs.
        minimize: Whether less is better.
        select: What the value of a trial is: its best one up to the rung, or that at the rung.
    """

    def __init__(
        self, rungs: Sequence[int], *, minimize: bool, select: Select = "checkpoint"
    ) -> None:
        self._rungs = rungs
        self._values_at = partial(values_at, minimize=minimize, select=select)
        self._reached = OfEachTrial(self._last_rung_with_values)
        self._shown = {rung: OfEachTrial(partial(self._at, rung)) for rung in rungs}
        self._as_they_ended = OfEachTrial(_as_it_ended)

    def show(
        self, trials: Sequence[FrozenTrial], *, startup: int, enough: int, first: int = 0
    ) -> list[FrozenTrial]:
        """Return trials as they were at the rung.

        Args:
            trials: The trials that a sampler would otherwise receive.
            startup: While fewer trials have ended with a result, all are returned as they ended.
            enough: How many trials of the sweep itself must have a finite value at the rung, at
                least 1.
            first: The place of the first of these; those of earlier sweeps come before.
        """
        ended = filter(self._has_result, trials)
        reached = sorted(self._reached(trials)[first:])
        high = [
            rung for rung in self._rungs if len(reached) - bisect_left(reached, rung) >= enough
        ]
        if not high or len(list(islice(ended, startup))) < startup:
            return self.as_they_ended(trials)
        return self._shown[high[-1]](trials)

    def as_they_ended(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return trials with their own last values; those that were cut off tell nothing."""
        return self._as_they_ended(trials)

    def _has_result(self, trial: FrozenTrial) -> bool:
        if trial.state not in (_COMPLETE, _PRUNED):
            return False
        if self._values_at(trial, self._rungs[0]) is None:
            return CUT_OFF not in trial.user_attrs
        return self._last_rung_with_values(trial) > 0

    def _last_rung_with_values(self, trial: FrozenTrial) -> int:
        """Return the highest rung that a trial has reached with finite values; 0 without one."""
        for rung in reversed(self._rungs) if trial.state != _FAIL else ():
            values = self._values_at(trial, rung)
            if values is not None and is_finite(values):
                return rung
        return 0

    def _at(self, rung: int, trial: FrozenTrial) -> FrozenTrial:
        """Return a trial as it was at a rung; unchanged if it was stopped before, or failed."""
        if trial.state == _FAIL:
            return trial
        values = self._values_at(trial, rung)
        if values is None:
            is_cut_off = trial.state == _COMPLETE or CUT_OFF in trial.user_attrs
            return telling_nothing(trial) if is_cut_off else trial
        if not is_finite(values):
            return as_failed(trial)
        shown = copy.copy(trial)
        shown.state, shown.values = _COMPLETE, list(values)
        shown.datetime_complete = trial.datetime_complete or trial.datetime_start
        return shown


def _as_it_ended(trial: FrozenTrial) -> FrozenTrial:
    is_nothing = trial.state == _PRUNED and CUT_OFF in trial.user_attrs
    return telling_nothing(trial) if is_nothing else trial
