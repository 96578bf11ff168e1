"""The trials of a sweep as its samplers receive them.

Samplers of Optuna know no edited spaces, repeated seeds, pauses or rungs. A sampler receives the
trials of the ledger after three steps:

1. `of_search` marks what a shorter budget has cut off, leaves out confirmations, and makes one
   trial of all seeds of a configuration.
2. `as_points` makes them points of the current space, with paused trials as ended ones, and puts
   the trials of earlier sweeps before them.
3. `for_sampler` does what a kind of sampler needs. It takes values at one rung where lengths
   differ (`multi_fidelity`), shows failures because of parameters as the worst
   (`failed_trials`), and gives each trial a generation where a sampler counts them.

The spec and the ledger decide everything. What must not live here: what is suggested (`suggest`).
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import optuna
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeps.config.logged_params import flatten
from sweeps.config.search_validators import LEARN_NOTHING
from sweeps.config.spec import SweepSpec
from sweeps.early_stopping.pausing_rules import make_pausing_rule
from sweeps.errors import SpecError
from sweeps.ledger.attributes import EXEMPT, is_of_search
from sweeps.ledger.over_seeds import repeats_of
from sweeps.ledger.ranking import is_finite
from sweeps.ledger.rung_values import is_cut_off, values_by
from sweeps.ledger.warm_start import WarmStart
from sweeps.optuna_compat.samplers import in_generations
from sweeps.optuna_compat.storage import set_trial_id
from sweeps.search.failed_trials import failures_as_worst
from sweeps.search.multi_fidelity import OfEachTrial, OneRung, enough_at_a_rung
from sweeps.search.seeds_as_one import seeds_as_one
from sweeps.search.trial_evidence import CUT_OFF, SEEDS, as_failed, reports_of, telling_nothing

SPACE = "gradsweep:space"
"""The trial attribute with the digest of the search space that its sampler used."""


class TrialHistory(Protocol):
    """What a suggestion depends on besides the spec; a ledger implements it."""

    @property
    def warm_start(self) -> WarmStart:
        """The trials of earlier sweeps that the sampler learns from."""

    @property
    def directions(self) -> list[StudyDirection]:
        """The direction of each metric."""

    @property
    def minimize(self) -> bool:
        """Whether less is better for the first metric."""

    @property
    def earlier_budgets(self) -> Collection[int]:
        """The reports of a full training under each revision of the spec."""

    def frozen_trials(self) -> list[FrozenTrial]:
        """Return all trials in the form of Optuna; one that has changed is another object."""


class ShownTrials:
    """Show the trials of a ledger to samplers.

    Args:
        spec: The sweep.
        ledger: The trials so far.
    """

    def __init__(self, spec: SweepSpec, ledger: TrialHistory) -> None:
        self._spec = spec
        self._ledger = ledger
        self.space = spec.search_space()
        self.distributions = {k: one.to_optuna() for k, one in self.space.ordered()}
        """The space in Optuna's form."""
        self.digest = self.space.digest()
        """Identifies the search space; see `SPACE`."""
        self._pauses = make_pausing_rule(spec)
        rungs = spec.early_stopping.rule.comparable_epochs(spec.budget.reports)
        self._rung = OneRung(rungs, minimize=ledger.minimize, select=spec.select)
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
        """Return trials as points of the space, those of earlier sweeps first.

        Args:
            but: The position of a trial that is left out.
        """
        if self._spec.search.sampler in LEARN_NOTHING:
            return self.warm_start
        trials = self.of_search()
        return [*self.warm_start, *map(self.as_point, trials[:but] + trials[but + 1 :])]

    def for_sampler(self, sampler: BaseSampler, shown: list[FrozenTrial]) -> list[FrozenTrial]:
        """Return trials as a sampler receives them.

        Args:
            sampler: The sampler.
            shown: The trials that `as_points` has returned.
        """
        received = failures_as_worst(
            self._as_they_compare(sampler, shown),
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
