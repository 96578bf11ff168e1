"""Suggestions: the parameters of the ledger's next trial.

Samplers run on a scratch study in memory. It contains the trials so far, as points of the current
search space, and a draft that is not in the ledger. A draft that violates a constraint is dropped,
and another one is drawn. The ledger stores only the final suggestion, in one transaction. So a
user may edit the space between two drivers, and a driver may die at any time. What must not live
here: building samplers (`samplers`), storing (`ledger`), and how trials of different lengths
compare (`multi_fidelity`).
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeps.config.logged_params import flatten
from sweeps.config.search_validators import LEARN_NOTHING
from sweeps.config.space import Distribution
from sweeps.config.spec import SweepSpec
from sweeps.early_stopping.pausing_rules import make_pausing_rule
from sweeps.errors import SpecError
from sweeps.ledger.attributes import EXEMPT, PRIORS, compared_values, is_of_search
from sweeps.ledger.over_seeds import repeats_of
from sweeps.ledger.suggestion import Suggestion
from sweeps.ledger.warm_start import WarmStart
from sweeps.optuna_compat.samplers import FIRST_GENERATION
from sweeps.optuna_compat.storage import set_trial_id
from sweeps.search.failed_trials import failures_as_worst
from sweeps.search.fallback import is_replaced, tells_nothing
from sweeps.search.modelled_trials import modelled_trials
from sweeps.search.multi_fidelity import enough_at_a_rung, project_to_rung
from sweeps.search.prior_trials import PriorTrials, PriorValues
from sweeps.search.samplers import Samplers
from sweeps.search.seeds_as_one import seeds_as_one
from sweeps.search.tried_points import TriedPoints
from trainable.seeding import derive_seed

SPACE = "gradsweep:space"
"""The trial attribute with the digest of the search space that its sampler used."""
_DRAFT = 0  # the id of the only trial that a scratch study creates
_ATTEMPTS = 8  # drafts of the sampler before another point is taken
_AROUND_PRIORS = 4  # of them, drafts around priors
_REPEATS = 3  # drafts of points that were tried, in a space with a finite number of them


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

    def frozen_trials(self) -> list[FrozenTrial]:
        """Return all trials in the form of Optuna."""


class Suggester:
    """Make the suggestions of a sweep from the spec and the ledger's trials alone.

    Args:
        spec: The sweep.
        ledger: The trials so far.
    """

    def __init__(self, spec: SweepSpec, ledger: TrialHistory) -> None:
        self._spec = spec
        self._ledger = ledger
        self._space = spec.search_space()
        self._distributions = {k: one.to_optuna() for k, one in self._space.ordered()}
        self._digest = self._space.digest()
        self._warm = list(self._earlier(ledger.warm_start))
        self._samplers = Samplers(spec, self._warm)
        self._priors = PriorTrials(spec)
        self._pauses = make_pausing_rule(spec)
        self._compared_at = spec.early_stopping.rule.comparable_epochs(spec.budget.reports)
        self._seeds = repeats_of(spec)
        self._tried = TriedPoints(self._space, lambda one: self._space.project(self._values(one)))
        # The members of a population change while they train, and seeds alone may differ.
        # In an endless space no point is drawn twice by chance: the sampler means it, so that the
        # nearest one serves better than another draft.
        self._most_repeats = 1 if self._space.num_points(1) is None else _REPEATS
        self._repeats = spec.early_stopping.rule.is_population or not self._distributions
        self._points: dict[int, dict[str, Any] | None] = {}  # a trial's parameters never change
        self._shown: dict[
            int, FrozenTrial
        ] = {}  # trials that have ended, as samplers receive them
        self._extra: list[int] = []  # why a trial exists never changes
        self._num_seen = 0
        self._waiting: dict[int, tuple[Any, FrozenTrial]] = {}  # paused ones, and their reports

    def _history(self) -> list[FrozenTrial]:
        """Return the trials of the search, numbered as if no trial trained another one's point.

        Such a trial would count the same point twice. Several seeds of a configuration are one.
        """
        trials = self._ledger.frozen_trials()
        if self._seeds is not None:
            kept = seeds_as_one(trials, self._seeds)
        elif not (extra := {*self._extra_trials(trials)}):
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

    def propose(self, number: int, stored: Mapping[str, Any] | None = None) -> Suggestion:
        """Return the parameters of a trial.

        Args:
            number: The number of the trial.
            stored: Parameters that the trial already has; the sampler adds the others.
        """
        points = self._spec.search.points
        self._tried.read(self._ledger.frozen_trials())
        may_repeat = self._repeats or stored is not None
        own = None if stored is None else number
        number = self._position(number)
        known = points[number] if number < len(points) else {}
        known = {**self._inside(known), **self._inside(stored or {})}
        may_repeat = may_repeat or self._space.unconditional().keys() <= known.keys()
        shown = [*self._warm, *self._others(number)]
        around = self._around_priors(number) if own is None else None
        # Where a trial has the priors themselves, another draft around them tells more.
        most_repeats = _REPEATS if around else self._most_repeats
        repeats = 0
        for attempt in range(_ATTEMPTS):
            if attempt == _AROUND_PRIORS and not repeats:
                around = None  # the constraints forbid what is near the priors
            prior = around(attempt) if around else None
            params, attrs = self._suggest_once(number, attempt, shown, known, own, prior)
            is_allowed = self._space.allows(params)
            if is_allowed and (may_repeat or not self._tried.contains(params)):
                break
            repeats += is_allowed
            if repeats == most_repeats or attempt == _ATTEMPTS - 1:
                params = self._another(number, params, known, is_allowed)
                attrs = attrs if is_allowed else {}  # a point near its own is the sampler's
                break
        return Suggestion(
            params,
            {key: self._distributions[key] for key in params},
            {**attrs, SPACE: self._digest},
            self._priors.digest if around else None,
        )

    def _around_priors(self, number: int) -> Callable[[int], PriorValues] | None:
        """Return the values of each attempt; None if the trial is not drawn around priors."""
        if not self._priors.any or number < len(self._spec.search.points):
            return None
        earlier = self._history()[:number]
        if not self._priors.takes(number, earlier):
            return None
        return lambda attempt: self._priors.values(number, attempt, earlier)

    def _place(self, number: int, prior: PriorValues | None) -> int:
        """Return a trial's number for its sampler.

        Trials that are drawn around priors have numbers of their own, beyond those of the others.
        So they are in addition to the sampler's sequence, and replace nothing in it.
        """
        if not self._priors.any:
            return number
        if prior is not None:
            return self._spec.trials + number
        earlier = self._history()[:number]
        return number - sum(PRIORS in trial.user_attrs for trial in earlier)

    def _position(self, number: int) -> int:
        """Return a trial's position among the trials of the search; see `_history`."""
        return number - bisect_left(self._extra_trials(self._ledger.frozen_trials()), number)

    def _extra_trials(self, trials: list[FrozenTrial]) -> list[int]:
        """Return the numbers of the trials that are not of the search, ascending."""
        new = trials[self._num_seen :]
        self._extra += [trial.number for trial in new if not is_of_search(trial.user_attrs)]
        self._num_seen = len(trials)
        return self._extra

    def _others(self, number: int) -> list[FrozenTrial]:
        if self._spec.search.sampler in LEARN_NOTHING:
            return []
        return [self._show(trial) for trial in self._history() if trial.number != number]

    def _suggest_once(
        self,
        number: int,
        attempt: int,
        shown: list[FrozenTrial],
        known: Mapping[str, Any],
        own: int | None,
        prior: PriorValues | None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a point of the sampler, and the trial attributes that the sampler set.

        In a trial that is drawn around priors, the sampler decides the other parameters.
        """
        is_grid = self._spec.search.sampler == "grid"
        tried = self._tried.keys(own) if is_grid else frozenset()
        sampler = self._samplers.of(self._place(number, prior), attempt, tried)
        told = self._shown_to(sampler, shown)
        may_fall_back = isinstance(sampler, GPSampler) and prior is None
        if may_fall_back and tells_nothing(told):
            return self._sample_random(number, known), {}
        scratch = _ScratchStudy(told, len(self._warm) + number)
        study = optuna.create_study(
            storage=scratch, directions=self._ledger.directions, sampler=sampler
        )
        study.ask()  # calls the hook of the sampler for a new trial
        relative = sampler.infer_relative_search_space(study, scratch.draft)
        relative = {k: one for k, one in relative.items() if self._is_joint(sampler, k, one)}
        suggested = sampler.sample_relative(study, scratch.draft, relative)

        def value(key: str, distribution: Distribution) -> Any:
            asked = self._distributions[key]
            if key in known:
                found = known[key]
            elif prior is not None and prior.has(key, distribution, scratch.draft.params):
                found = prior.of(key, distribution, scratch.draft.params)
            elif asked.single():
                found = distribution.at(0.0)
            elif key in suggested and distribution.contains(suggested[key]):
                found = suggested[key]
            else:
                found = sampler.sample_independent(study, scratch.draft, key, asked)
            found = distribution.normalize(found)
            scratch.set_trial_param(_DRAFT, key, asked.to_internal_repr(found), asked)
            return scratch.draft.params[key]

        point, attributes = self._space.point(value), dict(scratch.draft.system_attrs)
        if may_fall_back and suggested and is_replaced(number, point, shown, self._space):
            point = self._sample_random(number, known)
        return point, attributes

    def _shown_to(self, sampler: BaseSampler, shown: list[FrozenTrial]) -> list[FrozenTrial]:
        """Return trials as a sampler receives them."""
        told = failures_as_worst(
            self._as_they_compare(sampler, shown),
            sampler,
            startup=self._spec.search.startup_trials,
            directions=self._ledger.directions,
        )
        if isinstance(sampler, TPESampler) and len(self._ledger.directions) == 1:
            return modelled_trials(told, minimize=self._ledger.minimize)
        return told

    def _as_they_compare(
        self, sampler: BaseSampler, shown: list[FrozenTrial]
    ) -> list[FrozenTrial]:
        """Return trials as they were at one rung, for TPE and GP.

        These samplers would otherwise mix values of all lengths, or use complete trials alone.
        NSGA-II and CMA-ES store in the trials which ones were complete. A trial of an earlier
        sweep has one value, of its own last epoch, and is not comparable.
        """
        if not self._compared_at or self._warm or not isinstance(sampler, TPESampler | GPSampler):
            return shown
        startup = enough = max(1, self._spec.search.startup_trials)
        if isinstance(sampler, TPESampler):  # GP draws at random until so many trials are complete
            enough = min(enough, enough_at_a_rung(len(self._distributions)))
        return project_to_rung(
            shown,
            self._compared_at,
            startup=startup,
            enough=enough,
            minimize=self._ledger.minimize,
            select=self._spec.select,
        )

    def _is_joint(self, sampler: BaseSampler, key: str, distribution: BaseDistribution) -> bool:
        """Return whether a parameter may be suggested together with others.

        Samplers other than TPE assume that every trial has the parameters of the first ones.
        """
        return self._distributions.get(key) == distribution and (
            isinstance(sampler, TPESampler) or not self._space.distributions[key].when
        )

    def _another(
        self, number: int, params: dict[str, Any], known: Mapping[str, Any], is_allowed: bool
    ) -> dict[str, Any]:
        """Return a point instead of drafts that the constraints forbid, or that were all tried.

        There is an unused point as long as the search has trials left (`SweepSpec.num_trials`),
        unless the user has edited the space.
        """
        seed = derive_seed(self._spec.seed, "another", number)
        if not is_allowed:
            params = self._sample_random(number, known)
        if not self._repeats and self._tried.contains(params):
            return self._tried.nearest_unused(params, known, seed) or params
        return params

    def _sample_random(self, number: int, known: Mapping[str, Any]) -> dict[str, Any]:
        seed = derive_seed(self._spec.seed, "chance", number)
        # The spec's check has drawn with seed 0 and found a point, also beside each point to try
        # first. Stored parameters may violate a newer constraint, and the trial keeps them.
        space = self._space
        found = space.draw(seed, known) or space.draw(0, known) or space.draw(0)
        assert found is not None
        return found

    def _inside(self, params: Mapping[str, Any]) -> dict[str, Any]:
        space = self._space.distributions
        return {k: v for k, v in params.items() if k in space and space[k].contains(v)}

    def _point(self, trial: FrozenTrial) -> dict[str, Any] | None:
        """Return a trial as a point of this search space; None: it lies outside."""
        if trial.number not in self._points:
            self._points[trial.number] = self._space.project(self._values(trial))
        return self._points[trial.number]

    def _show(self, trial: FrozenTrial) -> FrozenTrial:
        """Return a trial as a point of this search space; a trial outside becomes a failed one."""
        if trial.number in self._shown:
            return self._shown[trial.number]
        reported = trial.state, trial.intermediate_values, len(trial.user_attrs)
        if (waiting := self._waiting.get(trial.number)) and waiting[0] == reported:
            return waiting[1]
        shown, is_paused = trial, self._is_paused(trial)
        params = self._point(trial)
        distributions = {key: self._distributions[key] for key in params or ()}
        digest = trial.system_attrs.get(SPACE, self._digest)
        if (trial.params, trial.distributions, digest) != (params, distributions, self._digest):
            shown = copy.copy(trial)
            if (trial.distributions, digest) != (distributions, self._digest):
                shown.system_attrs = {}  # what a sampler stored is void in another space
            shown.params, shown.distributions = params or {}, distributions
            if params is None:
                shown.state, shown.values = TrialState.FAIL, None
        if is_paused and params is not None:
            shown = copy.copy(shown)
            shown.state, shown.datetime_complete = TrialState.PRUNED, trial.datetime_start
        if self._warm:
            shown = copy.copy(shown)
            shown.number += len(self._warm)
        if trial.state.is_finished():
            self._shown[trial.number] = shown
        elif is_paused:
            self._waiting[trial.number] = copy.deepcopy(reported), shown
        return shown

    def _is_paused(self, trial: FrozenTrial) -> bool:
        """Return whether a trial pauses at a rung.

        Optuna's state of such a trial is running, and samplers learn from ended trials. Most
        sweeps whose trials pause would never get past `startup_trials`.
        """
        return (
            self._pauses is not None
            and not trial.state.is_finished()
            and EXEMPT not in trial.user_attrs
            and self._pauses.pauses_at(
                compared_values(trial.user_attrs, trial.intermediate_values)
            )
        )

    def _earlier(self, warm: WarmStart) -> Iterator[FrozenTrial]:
        """Yield the trials of earlier sweeps inside the space, numbered as if they came first."""
        points = ((prior, self._space.project(prior.params)) for prior in warm.trials)
        inside = ((prior, params) for prior, params in points if params is not None)
        for number, (prior, params) in enumerate(inside):
            trial = optuna.trial.create_trial(
                state=TrialState.COMPLETE if prior.complete else TrialState.PRUNED,
                value=prior.value,
                params=params,
                distributions={key: self._distributions[key] for key in params},
                intermediate_values={prior.epoch: prior.value},
                # NSGA-II: they belong to the first generation, the parents of the next one.
                system_attrs={**FIRST_GENERATION},
            )
            trial.number = number
            set_trial_id(trial, -1 - number)  # the ids of the ledger start at 1
            yield trial

    def _values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial's parameters, and the values of those that were added to the space."""
        if self._space.unconditional().keys() <= trial.params.keys():
            return trial.params
        try:
            config = self._spec.trial_config(trial.number, trial.params)
        except SpecError:
            return trial.params
        return {**dict(flatten(config.model_dump())), **trial.params}


class _ScratchStudy(InMemoryStorage):
    """A study in memory: the trials so far, which are read only, and one draft after them."""

    def __init__(self, shown: list[FrozenTrial], number: int) -> None:
        super().__init__()
        self._shown_trials = shown
        self._number = number

    @property
    def draft(self) -> FrozenTrial:
        """Return the draft in its current state."""
        return self.get_trial(_DRAFT)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        trial_id = super().create_new_trial(study_id, template_trial)
        self.get_trial(trial_id).number = self._number
        return trial_id

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Any = None,
    ) -> list[FrozenTrial]:
        shown = [t for t in self._shown_trials if states is None or t.state in states]
        draft = super().get_all_trials(study_id, deepcopy, states)
        return [*(copy.deepcopy(shown) if deepcopy else shown), *draft]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        return BaseStorage.get_best_trial(self, study_id)
