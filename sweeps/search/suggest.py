"""Proposals: which point the ledger's next trial gets.

A sampler is asked at a desk: a study in memory that shows it the trials so far as points of the
search space as it is, and on top of them a draft that no ledger knows. A draft that violates a
constraint is thrown away and another one drawn; only what is trained reaches the ledger, in one
piece. So a space may be edited between two drivers, and a driver may die at any moment. What must
not live here: building samplers (`samplers`), storing (`ledger`), and how trials of different
lengths compare (`rung_view`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeps.config.logged_params import flatten
from sweeps.config.search_space import Place
from sweeps.config.search_validators import LEARN_NOTHING
from sweeps.config.space import Distribution
from sweeps.config.spec import SpecError, SweepSpec
from sweeps.early_stopping.pausing_rules import make_pausing_rule
from sweeps.ledger.suggestion import Suggestion
from sweeps.ledger.warm_start import WarmStart
from sweeps.search.multi_fidelity import enough_at_a_rung, project_to_rung
from sweeps.search.samplers import Samplers
from trainable.seeding import derive_seed

SPACE = "gradsweep:space"
"""A trial's note: the digest of the search space that its sampler's own notes belong to."""
_DRAFT = 0  # a desk's only trial of its own
_ATTEMPTS = 8  # drafts of the sampler before chance has to find one that is allowed


class TrialHistory(Protocol):
    """What a proposal depends on beside the spec; a ledger has it."""

    @property
    def warm_start(self) -> WarmStart:
        """What the sweep was given of earlier ones."""

    @property
    def directions(self) -> list[StudyDirection]:
        """Whether less or more is better, of each metric."""

    @property
    def minimize(self) -> bool:
        """Whether less is better, of the first metric."""

    def frozen_trials(self) -> list[FrozenTrial]:
        """All trials as Optuna has them."""


class Suggester:
    """Makes a sweep's proposals. What it makes depends on the spec and the ledger's trials alone.

    Args:
        spec: The sweep.
        ledger: Its trials.
    """

    def __init__(self, spec: SweepSpec, ledger: TrialHistory) -> None:
        self._spec = spec
        self._ledger = ledger
        self._space = spec.search_space()
        self._distributions = {k: one.to_optuna() for k, one in self._space.ordered()}
        self._digest = self._space.digest()
        self._warm = list(self._earlier(ledger.warm_start))
        self._samplers = Samplers(spec, self._warm)
        self._pauses = make_pausing_rule(spec)
        self._compared_at = spec.early_stopping.rule.comparable_epochs(spec.budget.epochs)
        self._places: dict[int, Place | None] = {}  # nor does where they lie in a grid
        self._points: dict[int, dict[str, Any] | None] = {}  # a trial's parameters never change
        self._shown: dict[int, FrozenTrial] = {}  # what has ended does not change any more

    def propose(self, number: int, stored: Mapping[str, Any] | None = None) -> Suggestion:
        """Return the point of a trial.

        Args:
            number: The trial's.
            stored: Parameters that it has already; the others are made to fit.
        """
        points = self._spec.search.try_first
        known = points[number] if number < len(points) else {}
        known = {**self._inside(known), **self._inside(stored or {})}
        shown = [*self._warm, *self._others(number)]
        for attempt in range(_ATTEMPTS if self._space.constraints else 1):
            params, notes = self._suggest_once(number, attempt, shown, known)
            if self._space.allows(params):
                break
        else:
            params, notes = self._sample_random(number, known), {}
        return Suggestion(
            params,
            {key: self._distributions[key] for key in params},
            {**notes, SPACE: self._digest},
        )

    def _others(self, number: int) -> list[FrozenTrial]:
        if self._spec.search.sampler in LEARN_NOTHING:
            return []
        trials = self._ledger.frozen_trials()
        return [self._show(trial) for trial in trials if trial.number != number]

    def _tried(self, number: int) -> set[Place]:
        """Return what a grid has had. Points to try first are trials beside it."""
        if self._spec.search.sampler != "grid":
            return set()
        for trial in self._ledger.frozen_trials()[len(self._spec.search.try_first) :]:
            if trial.number not in self._places and trial.number != number:
                point = self._point(trial)
                self._places[trial.number] = None if point is None else self._space.place(point)
        had = (place for other, place in self._places.items() if other != number)
        return {place for place in had if place is not None}

    def _suggest_once(
        self, number: int, attempt: int, shown: list[FrozenTrial], known: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a point as the sampler suggests it, and the notes that it made."""
        sampler = self._samplers.of(number, attempt, self._tried(number))
        desk = _ScratchStudy(self._as_they_compare(sampler, shown), len(self._warm) + number)
        study = optuna.create_study(
            storage=desk, directions=self._ledger.directions, sampler=sampler
        )
        study.ask()  # tells the sampler that a trial begins
        relative = sampler.infer_relative_search_space(study, desk.draft)
        relative = {k: one for k, one in relative.items() if self._is_joint(sampler, k, one)}
        suggested = sampler.sample_relative(study, desk.draft, relative)

        def value(key: str, distribution: Distribution) -> Any:
            asked = self._distributions[key]
            if key in known:
                found = known[key]
            elif asked.single():
                found = distribution.at(0.0)
            elif key in suggested and distribution.contains(suggested[key]):
                found = suggested[key]
            else:
                found = sampler.sample_independent(study, desk.draft, key, asked)
            found = distribution.own(found)
            desk.set_trial_param(_DRAFT, key, asked.to_internal_repr(found), asked)
            return desk.draft.params[key]

        return self._space.point(value), dict(desk.draft.system_attrs)

    def _as_they_compare(
        self, sampler: BaseSampler, shown: list[FrozenTrial]
    ) -> list[FrozenTrial]:
        """Return trials as they were at one rung, to a sampler that would mix the values of all,
        or look at complete ones alone.

        NSGA-II and CMA-ES keep notes of who was complete. Trials of earlier sweeps bring one value
        each, of their own last epoch, and would not compare.
        """
        if not self._compared_at or self._warm or not isinstance(sampler, TPESampler | GPSampler):
            return shown
        startup = enough = max(1, self._spec.search.startup_trials)
        if isinstance(sampler, TPESampler):  # GP draws by chance until so many are complete
            enough = min(enough, enough_at_a_rung(len(self._distributions)))
        return project_to_rung(
            shown,
            self._compared_at,
            startup=startup,
            enough=enough,
            minimize=self._ledger.minimize,
        )

    def _is_joint(self, sampler: BaseSampler, key: str, distribution: BaseDistribution) -> bool:
        """Whether a parameter may be suggested together with others. Samplers but TPE take it that
        every trial has what the first ones had.
        """
        return self._distributions.get(key) == distribution and (
            isinstance(sampler, TPESampler) or not self._space.distributions[key].when
        )

    def _sample_random(self, number: int, known: Mapping[str, Any]) -> dict[str, Any]:
        seed = derive_seed(self._spec.seed, "chance", number)
        # The spec's own check has drawn with 0, and found one beside each point to try first. What
        # a trial has already may violate a constraint that is younger; it is kept all the same.
        space = self._space
        found = space.drawn(seed, known) or space.drawn(0, known) or space.drawn(0)
        assert found is not None
        return found

    def _inside(self, params: Mapping[str, Any]) -> dict[str, Any]:
        space = self._space.distributions
        return {k: v for k, v in params.items() if k in space and space[k].contains(v)}

    def _point(self, trial: FrozenTrial) -> dict[str, Any] | None:
        """Return a trial as a point of this search space; None where it is none."""
        if trial.number not in self._points:
            self._points[trial.number] = self._space.project(self._values(trial))
        return self._points[trial.number]

    def _show(self, trial: FrozenTrial) -> FrozenTrial:
        """Return a trial as a point of this search space; as one that failed where it is none."""
        if trial.number in self._shown:
            return self._shown[trial.number]
        shown = trial
        params = self._point(trial)
        distributions = {key: self._distributions[key] for key in params or ()}
        digest = trial.system_attrs.get(SPACE, self._digest)
        if (trial.params, trial.distributions, digest) != (params, distributions, self._digest):
            shown = copy.copy(trial)
            if (trial.distributions, digest) != (distributions, self._digest):
                shown.system_attrs = {}  # a sampler's notes mean nothing in another space
            shown.params, shown.distributions = params or {}, distributions
            if params is None:
                shown.state, shown.values = TrialState.FAIL, None
        if self._is_paused(shown):
            shown = copy.copy(shown)
            shown.state, shown.datetime_complete = TrialState.PRUNED, trial.datetime_start
        if self._warm:
            shown = copy.copy(shown)
            shown.number += len(self._warm)
        if trial.state.is_finished():
            self._shown[trial.number] = shown
        return shown

    def _is_paused(self, trial: FrozenTrial) -> bool:
        """Whether a trial waits at a rung. To Optuna it is a running one, and samplers learn from
        what has ended: most sweeps whose trials pause would never get past `startup_trials`.
        """
        return (
            self._pauses is not None
            and not trial.state.is_finished()
            and self._pauses.pauses_at(trial.intermediate_values)
        )

    def _earlier(self, warm: WarmStart) -> Iterator[FrozenTrial]:
        """Yield trials of earlier sweeps that lie inside the space, as if they had come before."""
        points = ((taken, self._space.project(taken.params)) for taken in warm.trials)
        inside = ((taken, params) for taken, params in points if params is not None)
        for number, (taken, params) in enumerate(inside):
            trial = optuna.trial.create_trial(
                state=TrialState.COMPLETE if taken.complete else TrialState.PRUNED,
                value=taken.value,
                params=params,
                distributions={key: self._distributions[key] for key in params},
                intermediate_values={taken.epoch: taken.value},
                # One of the first generation, from whose best the next ones descend.
                system_attrs={"NSGAIISampler:generation": 0},
            )
            trial.number = number
            trial._trial_id = -1 - number  # the ledger's count from 1
            yield trial

    def _values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial's parameters, and the values of those that were not searched yet."""
        if self._space.unconditional().keys() <= trial.params.keys():
            return trial.params
        try:
            config = self._spec.trial_config(trial.number, trial.params)
        except SpecError:
            return trial.params
        return {**dict(flatten(config.model_dump())), **trial.params}


class _ScratchStudy(InMemoryStorage):
    """Trials that are only looked at, and one draft behind them."""

    def __init__(self, shown: list[FrozenTrial], number: int) -> None:
        super().__init__()
        self._shown_trials = shown
        self._number = number

    @property
    def draft(self) -> FrozenTrial:
        """The draft as it is now."""
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
