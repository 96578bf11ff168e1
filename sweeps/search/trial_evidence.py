"""What a trial tells about its parameters: the one rule for samplers and for the priors.

| How a trial ended | What it tells |
|---|---|
| It trained to its end | Its values at all rungs |
| A stopping rule ended it, or keeps it waiting | Its values at the rungs that it has reached; above, that others were better |
| A request ended it, or a budget shorter than this sweep's (`CUT_OFF`) | Its values at the rungs that it has reached |
| It failed, perhaps because of its parameters | That no other trial is worse |
| It failed for another reason | Nothing |

Samplers of Optuna know states alone. So a trial that tells nothing is shown as a failed one without
parameters, which all of them ignore. What must not live here: which rung is taken
(`multi_fidelity`), and how samplers receive failures (`failed_trials`).
"""  # noqa: E501  a table

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

from optuna.trial import FrozenTrial, TrialState

from sweeps.config.sections import Select
from sweeps.early_stopping.metric_values import Value, all_values
from sweeps.ledger.attributes import compared_values
from sweeps.ledger.failure_kinds import may_be_of_parameters
from sweeps.ledger.ranking import value_of

CUT_OFF = "gradsweep:cut_off"
"""A trial attribute that samplers see: its end tells nothing about its parameters."""
# Python 3.11 takes long to look up a member of an enumeration for each of many trials.
_COMPLETE, _FAIL = TrialState.COMPLETE, TrialState.FAIL


def reports_of(trial: FrozenTrial) -> Mapping[int, Value]:
    """Return what each report of a trial brought, by epoch."""
    return compared_values(trial.user_attrs, trial.intermediate_values)


def epoch_reached(trial: FrozenTrial) -> float:
    """Return up to which epoch a trial can be compared; infinite if it trained to its end."""
    if trial.state == _COMPLETE and CUT_OFF not in trial.user_attrs:
        return math.inf
    return max(reports_of(trial), default=0)


def values_at(
    trial: FrozenTrial, rung: int, *, minimize: bool, select: Select
) -> tuple[float, ...] | None:
    """Return the values of a trial by a rung; None if it has not reached it, or none is finite.

    Args:
        trial: The trial.
        rung: An epoch.
        minimize: Whether less of the first metric is better.
        select: As in `value_of`.
    """
    if epoch_reached(trial) < rung:
        return None
    so_far = {epoch: all_values(one) for epoch, one in reports_of(trial).items() if epoch <= rung}
    return value_of(so_far, minimize=minimize, select=select)


def failed_by_parameters(trial: FrozenTrial) -> bool:
    """Return whether a trial failed because of its parameters, as far as one can tell."""
    return trial.state == _FAIL and may_be_of_parameters(trial.user_attrs.get("reason"))


def telling_nothing(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial in the form in which samplers ignore it."""
    shown = copy.copy(trial)
    shown.state, shown.values, shown.params, shown.distributions = _FAIL, None, {}, {}
    return shown
