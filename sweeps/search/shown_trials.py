"""The trials of a sweep as its samplers receive them.

Samplers of Optuna know no edited spaces, repeated seeds, pauses or rungs. A sampler receives the
trials of the ledger after three steps:

1. `of_search` marks what a shorter budget has cut off, leaves out those that train a point
   again, and makes one trial of all seeds of a configuration.
2. `as_points` makes them points of the current space, with paused trials as ended ones, and puts
   the trials of earlier sweeps before them.
3. `for_sampler` does what a kind of sampler needs. It takes values at one rung where lengths
   differ, shows failures because of parameters as the worst, and gives each trial a generation
   where a sampler counts them.

The spec and the ledger decide everything. What must not live here: what is suggested (`suggest`).
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import optuna
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeps.errors import SpecError
from sweeps.ledger.attributes import EXEMPT, compared_values, is_of_search, repeated_by
from sweeps.ledger.ledger import ENDINGS, Ledger
from sweeps.ledger.over_seeds import Repeats, repeats_of, state_of
from sweeps.ledger.ranking import NOT_FINITE, is_cut_off, is_finite, values_by, values_over_seeds
from sweeps.ledger.reasons import may_be_of_parameters
from sweeps.ledger.trials import NO_LIMITS, STATES
from sweeps.ledger.warm_start import WarmStart
from sweeps.optuna_compat.samplers import in_generations, set_trial_id
from sweeps.spec.sections import LEARN_NOTHING, Select
from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import flatten
from sweeps.statistics.feasibility import Limits
from sweeps.statistics.over_seeds import combine, standard_error
from sweeps.stopping.metric_values import Value
from sweeps.stopping.rule import make_pausing_rule
from sweeps.stopping.seed_means import Combine

SPACE = "gradsweep:space"
"""The trial attribute with the digest of the search space that its sampler used."""


class ShownTrials:
    """Show the trials of a ledger to samplers."""

    def __init__(self, spec: SweepSpec, ledger: Ledger) -> None:
        self._spec = spec
        self._ledger = ledger
        self.space = spec.search_space()
        self.distributions = {k: one.to_optuna() for k, one in self.space.ordered()}
        """The space in Optuna's form."""
        self.digest = self.space.digest()
        """Identifies the search space; see `SPACE`."""
        self._pauses = make_pausing_rule(spec)
        rungs = spec.early_stopping.rule.comparable_epochs(spec.budget.reports)
        self._rung = OneRung(
            rungs, minimize=ledger.minimize, select=spec.select, limits=spec.limits
        )
        self._judged = OfEachTrial(self._rung.judge)
        self._seeds = repeats_of(spec)
        warm = ledger.warm_start
        self.warm_start = list(self._earlier(warm))
        """The trials of a warm start, as points of the space."""
        self._is_warm_start_comparable = all(
            prior.reports for prior in warm.trials if self.space.project(prior.params) is not None
        )
        # By position: the point of a trial, which never changes, and what the trial was and how it
        # was shown.
        self._points: dict[int, dict[str, Any] | None] = {}
        self._shown: dict[int, tuple[FrozenTrial, FrozenTrial]] = {}
        self._marked = OfEachTrial(self._mark)
        self._extra: list[int] = []  # by number: why a trial exists never changes
        self._num_seen = 0

    def of_search(self) -> list[FrozenTrial]:
        """Return the trials of the search, numbered as if no trial trained another one's point.

        Such a trial would count the same point twice. Several seeds of a configuration are one.
        """
        trials = self._ledger.frozen_trials()
        if any(one < self._spec.budget.reports for one in self._ledger.earlier_budgets):
            trials = self._marked(trials)
        if self._seeds is not None:
            kept = seeds_as_one(trials, self._seeds)
        elif not (extra := {*self._extra_numbers(trials)}):
            return trials
        else:
            kept = [trial for trial in trials if trial.number not in extra]
        if len(kept) == len(trials):
            return trials
        for position, trial in enumerate(kept):
            if trial.number != position:
                kept[position] = copy.copy(trial)
                kept[position].number = position
        return kept

    def _mark(self, trial: FrozenTrial) -> FrozenTrial:
        """Return a trial, with a mark if its end says nothing."""
        complete = trial.state == TrialState.COMPLETE
        if not (complete or trial.state == TrialState.PRUNED) or not is_cut_off(
            complete=complete,
            reason=trial.user_attrs.get("reason"),
            last=max(reports_of(trial), default=0),
            budget=self._spec.budget.reports,
            earlier=self._ledger.earlier_budgets,
        ):
            return trial
        shown = copy.copy(trial)
        shown.user_attrs = {**trial.user_attrs, CUT_OFF: True}
        return shown

    def position(self, number: int) -> int:
        """Return the position of a trial among those of the search, by its number."""
        return number - bisect_left(self._extra_numbers(self._ledger.frozen_trials()), number)

    def _extra_numbers(self, trials: list[FrozenTrial]) -> list[int]:
        """Return the numbers of the trials that are not of the search, ascending."""
        new = trials[self._num_seen :]
        self._extra += [trial.number for trial in new if not is_of_search(trial.user_attrs)]
        self._num_seen = len(trials)
        return self._extra

    def as_points(self, but: int) -> list[FrozenTrial]:
        """Return trials as points of the space, those of earlier sweeps first."""
        if self._spec.search.sampler in LEARN_NOTHING:
            return self.warm_start
        trials = self.of_search()
        return [*self.warm_start, *map(self.as_point, trials[:but] + trials[but + 1 :])]

    def for_sampler(self, sampler: BaseSampler, shown: list[FrozenTrial]) -> list[FrozenTrial]:
        """Return trials as a sampler receives them."""
        received = self._as_they_compare(sampler, shown)
        if self._spec.constraints:
            received = self._judged(received)
        received = failures_as_worst(
            received,
            sampler,
            startup=self._spec.search.startup_trials,
            directions=self._ledger.directions,
        )
        return in_generations(received, sampler)

    def _as_they_compare(
        self, sampler: BaseSampler, shown: list[FrozenTrial]
    ) -> list[FrozenTrial]:
        """Return trials as they were at one rung, for TPE and GP.

        These samplers would otherwise mix values of all lengths, or use complete trials alone.
        NSGA-II and CMA-ES store in the trials which ones were complete. The sweep's own trials
        decide which rung it is: all those of a warm start may have reached the last one. Without
        reports these cannot be compared at a rung.
        """
        if not isinstance(sampler, TPESampler | GPSampler):
            return shown
        if not self._is_warm_start_comparable:
            return self._rung.as_they_ended(shown)
        startup = enough = max(1, self._spec.search.startup_trials)
        if isinstance(sampler, TPESampler):  # GP draws at random until so many trials are complete
            enough = min(enough, enough_at_a_rung(len(self.distributions)))
        first = len(self.warm_start)
        return self._rung.show(shown, startup=startup, enough=enough, first=first)

    def point_of(self, trial: FrozenTrial) -> dict[str, Any] | None:
        """Return the parameters of a trial as a point of the space; None: it lies outside."""
        return self.space.project(self._values(trial))

    def as_point(self, trial: FrozenTrial) -> FrozenTrial:
        """Return a trial of the search as a point of the space; one outside as a failed one."""
        known = self._shown.get(trial.number)
        if known is not None and (known[0] is trial or known[0].state.is_finished()):
            return known[1]
        shown = trial
        if trial.number not in self._points:
            self._points[trial.number] = self.point_of(trial)
        params = self._points[trial.number]
        distributions = {key: self.distributions[key] for key in params or ()}
        digest = trial.system_attrs.get(SPACE, self.digest)
        if (trial.params, trial.distributions, digest) != (params, distributions, self.digest):
            shown = copy.copy(trial)
            if (trial.distributions, digest) != (distributions, self.digest):
                shown.system_attrs = {}  # what a sampler stored is void in another space
            shown.params, shown.distributions = params or {}, distributions
        if params is None:
            shown = telling_nothing(shown)
        elif self._waits_at_rung(trial):
            if not trial.state.is_finished():
                shown = copy.copy(shown)
                shown.state, shown.datetime_complete = TrialState.PRUNED, trial.datetime_start
        else:
            shown = self._mark(shown)
        if shown.state == TrialState.PRUNED and self._has_no_value(shown):
            shown = as_failed(shown)
        if self.warm_start:
            shown = copy.copy(shown)
            shown.number += len(self.warm_start)
        self._shown[trial.number] = trial, shown
        return shown

    def _waits_at_rung(self, trial: FrozenTrial) -> bool:
        """Return whether a trial pauses at a rung, or was stopped while it did.

        Optuna's state of a paused trial is running, and samplers learn from ended trials. Most
        sweeps whose trials pause would never get past `startup_trials`. A request to stop it
        changes nothing: other trials were promoted.
        """
        return (
            self._pauses is not None
            and trial.state not in (TrialState.COMPLETE, TrialState.FAIL)
            and EXEMPT not in trial.user_attrs
            and SEEDS not in trial.user_attrs  # its first seed is complete
            and self._pauses.pauses_at(reports_of(trial))
        )

    def _has_no_value(self, pruned: FrozenTrial) -> bool:
        """Return whether a trial has reported no value; a trial that ends so has failed."""
        reports, select = reports_of(pruned), self._spec.select
        if not reports or CUT_OFF in pruned.user_attrs:
            return False
        minimize = self._ledger.minimize
        return not is_finite(values_by(reports, max(reports), minimize=minimize, select=select))

    def _earlier(self, warm: WarmStart) -> Iterator[FrozenTrial]:
        """Yield the trials of earlier sweeps inside the space, numbered as if they came first."""
        points = ((prior, self.space.project(prior.params)) for prior in warm.trials)
        inside = ((prior, params) for prior, params in points if params is not None)
        for number, (prior, params) in enumerate(inside):
            trial = optuna.trial.create_trial(
                state=TrialState.COMPLETE if prior.complete else TrialState.PRUNED,
                value=prior.value,
                params=params,
                distributions={key: self.distributions[key] for key in params},
                intermediate_values=dict(prior.reports) or {prior.epoch: prior.value},
                user_attrs={CUT_OFF: True} if prior.cut_off else {},
            )
            trial.number = number
            set_trial_id(trial, -1 - number)  # the ids of the ledger start at 1
            yield trial

    def _values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial's parameters, and the values of those that were added to the space."""
        if self.space.unconditional().keys() <= trial.params.keys():
            return trial.params
        try:
            config = self._spec.trial_config(trial.number, trial.params)
        except SpecError:
            return trial.params
        return {**dict(flatten(config.model_dump())), **trial.params}


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
    judged = [one.system_attrs[CONSTRAINTS] for one in results if CONSTRAINTS in one.system_attrs]
    margins = [max(column) for column in zip(*judged, strict=True)]
    if not isinstance(sampler, TPESampler):
        columns = zip(*(trial.values for trial in results), strict=True)
        worst = [
            max(values) if direction == StudyDirection.MINIMIZE else min(values)
            for values, direction in zip(columns, directions, strict=True)
        ]
    return [
        _as_worst(trial, worst, margins) if place in failed else trial
        for place, trial in enumerate(trials)
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


def _as_worst(trial: FrozenTrial, worst: list[float] | None, margins: list[float]) -> FrozenTrial:
    shown = _as_ended(trial, _PRUNED if worst is None else _COMPLETE, worst)
    shown.intermediate_values = {}
    return with_margins(shown, margins) if margins else shown


def with_margins(trial: FrozenTrial, margins: list[float]) -> FrozenTrial:
    """Return a trial with what Optuna's samplers read of constraints; above 0 is a violation."""
    shown = copy.copy(trial)
    shown.system_attrs = {**trial.system_attrs, CONSTRAINTS: margins}
    return shown


def _as_ended(trial: FrozenTrial, state: TrialState, values: list[float] | None) -> FrozenTrial:
    """Return a trial with another end; one that still trains seems to have ended at its start."""
    shown = copy.copy(trial)
    shown.state, shown.values = state, values
    shown.datetime_complete = trial.datetime_complete or trial.datetime_start
    return shown


_T = TypeVar("_T")
# Python 3.11 takes long to look up a member of an enumeration for each of many trials.
_COMPLETE, _PRUNED, _FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL


def enough_at_a_rung(parameters: int) -> int:
    """Return how many trials at a rung a model of its values needs.

    The number is N_min + 2 of Falkner et al., "BOHB" (2018), with N_min = d + 1.
    """
    return parameters + 3


class OfEachTrial(Generic[_T]):
    """Compute something of each of many trials, and again only where a trial is another object."""

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
    """

    def __init__(
        self,
        rungs: Sequence[int],
        *,
        minimize: bool,
        select: Select = "checkpoint",
        limits: Limits = NO_LIMITS,
    ) -> None:
        self._rungs, self._limits = rungs, limits
        self._values_at = partial(values_at, minimize=minimize, select=select)
        self._values_by = partial(values_by, minimize=minimize, select=select)
        self._reached = OfEachTrial(self._last_rung_with_values)
        self._shown = {rung: OfEachTrial(partial(self._at, rung)) for rung in rungs}
        self._as_they_ended = OfEachTrial(_as_it_ended)

    def show(
        self, trials: Sequence[FrozenTrial], *, startup: int, enough: int, first: int = 0
    ) -> list[FrozenTrial]:
        """Return trials as they were at the rung."""
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
        if not self._limits:
            return _as_ended(trial, _COMPLETE, list(values))
        shown = _as_ended(trial, _COMPLETE, list(values[: self._limits.num_metrics]))
        return with_margins(shown, self._limits.margins(values))

    def judge(self, trial: FrozenTrial) -> FrozenTrial:
        """Return an ended trial with the margins of its values, unless it has those at a rung."""
        if not trial.state.is_finished() or CONSTRAINTS in trial.system_attrs:
            return trial
        seeds = trial.user_attrs.get(SEEDS)
        curves = map(reports_of, [trial] if seeds is None else seeds.trials)
        values = [self._values_by(one, max(one)) for one in curves if one]
        if seeds is not None and values:
            values = [values_over_seeds(values, seeds.combine)]
        if not values or not is_finite(values[0]):
            return trial
        return with_margins(trial, self._limits.margins(values[0]))


def _as_it_ended(trial: FrozenTrial) -> FrozenTrial:
    is_nothing = trial.state == _PRUNED and CUT_OFF in trial.user_attrs
    return telling_nothing(trial) if is_nothing else trial


STANDARD_ERROR = "standard_error"
"""A trial attribute that samplers see: the standard error of a configuration's value."""
NUM_SEEDS = "num_seeds"
"""A trial attribute that samplers see: from how many seeds a configuration's value is."""


def origins_in(trials: Sequence[FrozenTrial]) -> dict[int, int]:
    """Return the configuration of each trial that repeats one, by the trial's number."""
    found = ((trial.number, repeated_by(trial.user_attrs)) for trial in trials)
    return {number: origin for number, origin in found if origin is not None}


def seeds_as_one(trials: Sequence[FrozenTrial], repeats: Repeats) -> list[FrozenTrial]:
    """Return the trials of the search, each with what all seeds of its configuration have shown.

    Such a trial has ended when the last of its seeds has, for the reason of the seed that decides
    how it ended. Its values at rungs are those of its seeds (`values_at`).
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
    state = state_of([STATES[trial.state.name] for trial in mine], repeats.seeds)
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
    shown.state = ENDINGS[state]
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


CONSTRAINTS = "constraints"
"""Optuna's attribute of a trial with its constraints, by which samplers split or rank trials."""
CUT_OFF = "gradsweep:cut_off"
"""A trial attribute that samplers see: its end tells nothing about its parameters."""
SEEDS = "gradsweep:seeds"
"""A trial attribute that samplers see: the `Seeds` of a configuration."""
NOT_FINITE_REASON = "non_finite: no value is finite"
"""The reason of a trial that is shown as failed, because its values are not finite."""


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
    """Return the values of a trial by a rung, or `NOT_FINITE`; None if it has not reached it."""
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
