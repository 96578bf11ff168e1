"""Suggestions: the parameters of the ledger's next trial.

Samplers run on a scratch study in memory. It contains the trials so far (`shown_trials`), and a
draft that is not in the ledger. Each value of the draft comes from the first of these that has
one: the point that the user gave or the trial has, the priors, the sampler. A draft is dropped
if it violates a constraint or was tried before, and after some drafts another point is taken. GP
gives way to a random point where its model says nothing.

The ledger stores only the final suggestion, in one transaction. So a user may edit the space
between two drivers, and a driver may die at any time. What must not live here: building samplers
(`samplers`), which trials they see and how (`shown_trials`), and storing (`ledger`).
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from sweeps.ledger.attributes import PRIORS, is_of_search
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.optuna_compat.samplers import AllowingGPSampler
from sweeps.optuna_compat.tpe import ArrayTPESampler, TrialTable
from sweeps.search.prior_trials import PriorTrials, PriorValues
from sweeps.search.samplers import Samplers
from sweeps.search.shown_trials import SPACE, ShownTrials
from sweeps.spec.search_space import PointKey, SearchSpace
from sweeps.spec.sections import LEARN_NOTHING
from sweeps.spec.space import Choice, Distribution
from sweeps.spec.spec import SweepSpec
from trainable.seeding import derive_seed

_DRAFT = 0  # the id of the only trial that a scratch study creates
_ATTEMPTS = 8  # drafts of the sampler before another point is taken
_AROUND_PRIORS = 4  # of them, drafts around priors
_LOOKED_AT = 16  # points of trials of which the missing values of a point are taken
_REPEATS = 3  # drafts of points that were tried, in a space with a finite number of them


class Suggester:
    """Make the suggestions of a sweep from the spec and the ledger's trials alone."""

    def __init__(self, spec: SweepSpec, ledger: Ledger) -> None:
        self._spec = spec
        self._ledger = ledger
        self._trials = ShownTrials(spec, ledger)
        self._space, self._distributions = self._trials.space, self._trials.distributions
        self._samplers = Samplers(spec, self._trials.warm_start)
        self._table = TrialTable(self._distributions, len(ledger.directions))
        self._priors = PriorTrials(spec)
        self._tried = TriedPoints(self._space, self._trials.point_of)
        # The members of a population change while they train, and seeds alone may differ.
        # In an endless space no point is drawn twice by chance: the sampler means it, so that the
        # nearest one serves better than another draft.
        self._most_repeats = 1 if self._space.num_points(1) is None else _REPEATS
        self._repeats = spec.early_stopping.rule.is_population or not self._distributions

    @property
    def reads_results(self) -> bool:
        """Whether reports and ends of trials change suggestions."""
        return self._priors.any or self._spec.search.sampler not in LEARN_NOTHING

    def propose(self, number: int, stored: Mapping[str, Any] | None = None) -> Suggestion:
        """Return the parameters of a trial."""
        points = self._spec.search.points
        self._tried.read(self._ledger.frozen_trials())
        may_repeat = self._repeats or stored is not None
        own = None if stored is None else number
        number = self._trials.position(number)
        known = points[number] if number < len(points) else {}
        known = {**self._inside(known), **self._inside(stored or {})}
        may_repeat = may_repeat or self._space.unconditional().keys() <= known.keys()
        shown = self._trials.as_points(but=number)
        around = self._around_priors(number) if own is None else None
        # Where a trial has the priors themselves, another draft around them tells more.
        most_repeats = _REPEATS if around else self._most_repeats
        repeats = 0
        for attempt in range(_ATTEMPTS):
            if attempt == _AROUND_PRIORS and not repeats:
                around = None  # the constraints forbid what is near the priors
            prior = around(attempt) if around else None
            params, attrs = self._suggest_once(number, attempt, shown, known, own, prior)
            if prior is not None and not prior.used:  # conditions rule out all that have priors
                around = prior = None
                params, attrs = self._suggest_once(number, attempt, shown, known, own, None)
            is_allowed = self._space.allows(params)
            if is_allowed and (may_repeat or not self._tried.contains(params)):
                break
            repeats += is_allowed
            if repeats == most_repeats or attempt == _ATTEMPTS - 1:
                params = self._another(number, params, known, is_allowed)
                if not is_allowed:  # otherwise the point lies near the draft
                    prior = None
                break
        # What the sampler has stored stays with a point in place of its own: CMA-ES and NSGA-II
        # learn from no trial without it.
        return Suggestion(
            params,
            {key: self._distributions[key] for key in params},
            {**attrs, SPACE: self._trials.digest},
            None if prior is None else prior.digest,
        )

    def _around_priors(self, number: int) -> Callable[[int], PriorValues] | None:
        """Return the values of each attempt; None if the trial is not drawn around priors."""
        if not self._priors.any or number < len(self._spec.search.points):
            return None
        earlier = self._trials.of_search()[:number]
        if not self._priors.takes(number, earlier):
            return None
        return lambda attempt: self._priors.values(number, attempt, earlier)

    def _place_in_sequence(self, number: int) -> int:
        """Return the number of a trial among those that are not drawn around priors.

        So trials around priors are in addition to the sampler's sequence, and replace nothing.
        """
        if not self._priors.any:
            return number
        earlier = self._trials.of_search()[:number]
        return number - sum(PRIORS in trial.user_attrs for trial in earlier)

    def _suggest_once(
        self,
        number: int,
        attempt: int,
        shown: list[FrozenTrial],
        known: Mapping[str, Any],
        own: int | None,
        prior: PriorValues | None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a point of the sampler, and the trial attributes that the sampler set."""
        is_grid = self._spec.search.sampler == "grid"
        tried = self._tried.keys(own) if is_grid else frozenset()
        if prior is None:
            sampler = self._samplers.of(self._place_in_sequence(number), attempt, tried)
        else:
            sampler = self._samplers.of_priors(number, attempt)
        received = self._trials.for_sampler(sampler, shown)
        may_fall_back = isinstance(sampler, GPSampler) and prior is None
        if may_fall_back and tells_nothing(received):
            return self._sample_random(number, known), {}
        scratch = _ScratchStudy(received, len(self._trials.warm_start) + number)
        study = optuna.create_study(
            storage=scratch, directions=self._ledger.directions, sampler=sampler
        )
        if isinstance(sampler, ArrayTPESampler):
            scratch.shown_trials = sampler.learn_from(received, study, self._table)
        if self._space.constraints and isinstance(sampler, ArrayTPESampler | AllowingGPSampler):
            sampler.allows = self._may_suggest(known, shown)
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

        point = self._space.point(value, () if prior is None else prior.first)
        attributes = dict(scratch.draft.system_attrs)
        if may_fall_back and suggested and is_known(point, shown, self._space):
            point = self._sample_random(number, known)
        return point, attributes

    def _may_suggest(
        self, known: Mapping[str, Any], shown: Sequence[FrozenTrial]
    ) -> Callable[[Mapping[str, Any]], bool]:
        """Return whether the constraints may allow a point with some of its values."""
        points = [one.params for one in shown if one.params]
        points = points[:: len(points) // _LOOKED_AT + 1]
        may_allow = self._space.may_allow(points)
        return lambda some: may_allow({**some, **known})

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
        inside = {k: v for k, v in params.items() if k in space and space[k].contains(v)}
        return {k: space[k].normalize(v) for k, v in inside.items()}


class _ScratchStudy(InMemoryStorage):
    """A study in memory: the trials so far, which are read only, and one draft after them."""

    def __init__(self, shown: list[FrozenTrial], number: int) -> None:
        super().__init__()
        self.shown_trials = shown
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
        shown = [t for t in self.shown_trials if states is None or t.state in states]
        draft = super().get_all_trials(study_id, deepcopy, states)
        return [*(copy.deepcopy(shown) if deepcopy else shown), *draft]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        return BaseStorage.get_best_trial(self, study_id)


_NEAR = 0.01
"""A point is near another if no parameter is further away than this share of its range."""


def tells_nothing(shown: Sequence[FrozenTrial]) -> bool:
    """Return whether all complete trials, of at least two, have the same values."""
    values = {tuple(trial.values) for trial in shown if trial.state == TrialState.COMPLETE}
    return len(values) == 1 and sum(trial.state == TrialState.COMPLETE for trial in shown) > 1


def is_known(point: Mapping[str, Any], shown: Sequence[FrozenTrial], space: SearchSpace) -> bool:
    """Return whether a suggestion is near the point of a trial, so that a random one is better."""
    return any(_is_near(point, one.params, space) for one in shown)


def _is_near(one: Mapping[str, Any], other: Mapping[str, Any], space: SearchSpace) -> bool:
    return one.keys() == other.keys() and all(
        space.distributions[key].distance(value, other[key]) <= _NEAR for key, value in one.items()
    )


_MOST_COMPARED = 20_000
"""Of a space with more points, some near the given one and random ones are compared."""
_DRAWS = 64
_CLOSE = 0.05
"""So far on each side of a point, as a share of each range, points near it are drawn."""


class TriedPoints:
    """The points that trials have used."""

    def __init__(
        self, space: SearchSpace, point_of: Callable[[FrozenTrial], Mapping[str, Any] | None]
    ) -> None:
        self._space, self._point_of = space, point_of
        self._keys: dict[int, PointKey] = {}
        self._used: set[PointKey] = set()
        self._num_read = 0

    def read(self, trials: Sequence[FrozenTrial]) -> None:
        """Add the points of the trials that were created since the last call."""
        for trial in trials[self._num_read :]:
            if is_of_search(trial.user_attrs) and (point := self._point_of(trial)) is not None:
                self._keys[trial.number] = self._space.point_key(point)
                self._used.add(self._keys[trial.number])
        self._num_read = len(trials)

    def contains(self, point: Mapping[str, Any]) -> bool:
        """Return whether a trial has used a point, or one that is the same to a training."""
        return self._space.point_key(point) in self._used

    def keys(self, but: int | None = None) -> set[PointKey]:
        """Return the used points."""
        if but not in self._keys:
            return self._used
        return {key for number, key in self._keys.items() if number != but}

    def nearest_unused(
        self, point: Mapping[str, Any], known: Mapping[str, Any], seed: int
    ) -> dict[str, Any] | None:
        """Return the point nearest to a given one that no trial has used, if there is one."""
        candidates = self._candidates(point, known, seed)
        unused = (one for one in candidates if not self.contains(one))
        return min(unused, key=lambda one: self._space.distance(point, one), default=None)

    def _candidates(
        self, point: Mapping[str, Any], known: Mapping[str, Any], seed: int
    ) -> Iterator[dict[str, Any]]:
        size = self._space.num_points(_MOST_COMPARED + 1)
        if size is not None and size <= _MOST_COMPARED:
            for one in self._space.grid():
                if all(one.get(key, value) == value for key, value in known.items()):
                    yield one
            return
        generator = random.Random(seed)

        def value(key: str, distribution: Distribution) -> Any:
            if key in known or key not in point or isinstance(distribution, Choice):
                return point.get(key, distribution.at(generator.random()))
            at = distribution.position(point[key]) + generator.uniform(-_CLOSE, _NEAR)
            return distribution.at(min(max(at, 0.0), math.nextafter(1.0, 0.0)))

        near = (self._space.point(value) for _ in range(_DRAWS))
        yield from filter(self._space.allows, near)
        drawn = (self._space.draw(seed + index, known) for index in range(_DRAWS))
        yield from (one for one in drawn if one is not None)
