"""Show samplers each configuration as one trial, where it trains with several seeds.

Samplers of Optuna take no standard error: they receive the configuration's value alone. The error
and the number of seeds are attributes of the trial that they see. What must not live here: which
trials are the seeds of a configuration (`ledger.over_seeds`), and suggestions (`suggest`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from sweeps.ledger.attributes import is_of_search, repeated_by
from sweeps.ledger.over_seeds import Repeats, state_of
from sweeps.search.trial_evidence import SEEDS, Seeds, failed_by_parameters
from sweeps.statistics.over_seeds import combine, standard_error
from sweeps.stopping.seed_means import Combine

STANDARD_ERROR = "standard_error"
"""A trial attribute that samplers see: the standard error of a configuration's value."""
NUM_SEEDS = "num_seeds"
"""A trial attribute that samplers see: from how many seeds a configuration's value is."""
_STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_ENDS = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


def origins_in(trials: Sequence[FrozenTrial]) -> dict[int, int]:
    """Return the configuration of each trial that repeats one, by the trial's number."""
    found = ((trial.number, repeated_by(trial.user_attrs)) for trial in trials)
    return {number: origin for number, origin in found if origin is not None}


def seeds_as_one(trials: Sequence[FrozenTrial], repeats: Repeats) -> list[FrozenTrial]:
    """Return the trials of the search, each with what all seeds of its configuration have shown.

    Such a trial has ended when the last of its seeds has, for the reason of the seed that decides
    how it ended. Its values at rungs are those of its seeds (`trial_evidence`).
    """
    seeds: dict[int, list[FrozenTrial]] = {
        trial.number: [trial] for trial in trials if is_of_search(trial.user_attrs)
    }
    for number, origin in origins_in(trials).items():
        seeds[origin].append(trials[number])

    def of_several(values: Sequence[float]) -> float:
        return combine(values, repeats.value)

    return [_as_one(mine, repeats, of_several) for mine in seeds.values()]


def _as_one(mine: Sequence[FrozenTrial], repeats: Repeats, combine: Combine) -> FrozenTrial:
    state = state_of([_STATES[trial.state] for trial in mine], repeats.seeds)
    first = mine[0]
    if len(mine) == 1 and (state != "running" or not first.state.is_finished()):
        return first
    shown = copy.copy(first)
    shown.state, shown.values, shown.datetime_complete = TrialState.RUNNING, None, None
    # No report is the configuration's: the best one of each seed counts, whenever it came.
    shown.intermediate_values = {}
    shown.user_attrs = {**first.user_attrs, SEEDS: Seeds(mine, combine)}
    if state == "running":
        return shown
    shown.state = _ENDS[state]
    shown.datetime_complete = max(t.datetime_complete for t in mine if t.datetime_complete)
    if state == "complete":
        every = [trial.values for trial in mine]
        shown.values = [combine(metric) for metric in zip(*every, strict=True)]
        error = standard_error([values[0] for values in every], repeats.value)
        shown.user_attrs = {**shown.user_attrs, NUM_SEEDS: len(mine), STANDARD_ERROR: error}
        return shown
    # Of several failures, one that the parameters may have caused.
    decided = max((t for t in mine if t.state == shown.state), key=failed_by_parameters)
    shown.user_attrs = {**shown.user_attrs, "reason": decided.user_attrs.get("reason")}
    return shown
