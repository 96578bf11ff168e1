"""What a trial tells about its parameters: the one rule for samplers and for the priors.

| How a trial ended | What it tells |
|---|---|
| It trained to its end | Its values at all rungs |
| A stopping rule ended it, or keeps it waiting | Its values at the rungs that it has reached; above, that others were better |
| A request ended it, or a budget shorter than this sweep's (`CUT_OFF`) | Its values at the rungs that it has reached |
| It failed, perhaps because of its parameters | That no other trial is worse |
| It failed for another reason | Nothing to samplers; to the priors, its values at the rungs that it has reached |

A value at a rung that is not finite tells what a failure because of parameters tells. With several
seeds, a configuration has the mean or the median of its seeds' values at the rung: of those that
have reached it while it trains, and of all once it is complete.

Samplers of Optuna know states alone. So a trial that tells nothing is shown as a failed one without
parameters, which all of them ignore. What must not live here: which rung is taken
and how samplers receive failures (`shown_trials`).
"""  # noqa: E501  a table

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from optuna.trial import FrozenTrial, TrialState

from sweeps.ledger.attributes import compared_values
from sweeps.ledger.ranking import NOT_FINITE, values_by, values_over_seeds
from sweeps.ledger.stop_reasons import may_be_of_parameters
from sweeps.spec.sections import Select
from sweeps.stopping.metric_values import Value

CUT_OFF = "gradsweep:cut_off"
"""A trial attribute that samplers see: its end tells nothing about its parameters."""
SEEDS = "gradsweep:seeds"
"""A trial attribute that samplers see: the `Seeds` of a configuration."""
NOT_FINITE_REASON = "non_finite: no value is finite"
"""The reason of a trial that is shown as failed, because its values are not finite."""
# Python 3.11 takes long to look up a member of an enumeration for each of many trials.
_COMPLETE, _FAIL = TrialState.COMPLETE, TrialState.FAIL


class Seeds(NamedTuple):
    """The seeds of a configuration so far, of which the first is complete."""

    trials: Sequence[FrozenTrial]
    combine: Callable[[Sequence[float]], float]
    """Returns one number for several seeds."""


def reports_of(trial: FrozenTrial) -> Mapping[int, Value]:
    """Return what each report of a trial brought, by epoch."""
    return compared_values(trial.user_attrs, trial.intermediate_values)


def values_at(
    trial: FrozenTrial, rung: int, *, minimize: bool, select: Select
) -> tuple[float, ...] | None:
    """Return the values of a trial by a rung; None if it has not reached it.

    They are `NOT_FINITE` if none is finite, or if it failed because of its parameters.
    """
    if failed_by_parameters(trial):
        return NOT_FINITE
    if (seeds := trial.user_attrs.get(SEEDS)) is not None:
        found = [values_at(one, rung, minimize=minimize, select=select) for one in seeds.trials]
        known = [values for values in found if values is not None]
        if not known or (trial.state == _COMPLETE and len(known) < len(found)):
            return None
        return values_over_seeds(known, seeds.combine)
    reports = reports_of(trial)
    if _epoch_reached(trial, reports) < rung:
        return None
    return values_by(reports, rung, minimize=minimize, select=select)


def _epoch_reached(trial: FrozenTrial, reports: Mapping[int, Value]) -> float:
    """Return up to which epoch a trial can be compared; infinite if it trained to its end."""
    if trial.state == _COMPLETE and CUT_OFF not in trial.user_attrs:
        return math.inf
    return max(reports, default=0)


def failed_by_parameters(trial: FrozenTrial) -> bool:
    """Return whether a trial failed because of its parameters, as far as one can tell."""
    return trial.state == _FAIL and may_be_of_parameters(trial.user_attrs.get("reason"))


def as_failed(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial whose values are not finite as one that its parameters made fail."""
    if failed_by_parameters(trial):
        return trial
    shown = copy.copy(trial)
    shown.state, shown.values = _FAIL, None
    shown.user_attrs = {**trial.user_attrs, "reason": NOT_FINITE_REASON}
    return shown


def telling_nothing(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial in the form in which samplers ignore it."""
    shown = copy.copy(trial)
    shown.state, shown.values, shown.params, shown.distributions = _FAIL, None, {}, {}
    return shown
