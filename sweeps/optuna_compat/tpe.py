"""Optuna's TPE on arrays that are kept from one suggestion to the next.

Optuna goes through all trials several times for each suggestion, and with several metrics for each
parameter. Here each trial is read once, and again only where it has changed. The ranks of trials,
the densities and the choice of a value follow Optuna's bit by bit, except with three or more
metrics: the trials that TPE imitates are then chosen by `statistics.fronts.spread`. What must not
live here: which trials TPE receives, and with which constraints (`search`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.samplers._tpe import _truncnorm
from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator
from optuna.samplers._tpe.probability_distributions import _BatchedCategoricalDistributions
from optuna.samplers._tpe.sampler import (
    _get_infeasible_trial_score,
    _get_pruned_trial_score,
    _get_reference_point,
    _solve_hssp_with_cache,
    default_gamma,
    default_gamma_multiobjective,
)
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeps.statistics.fronts import fronts, spread

_Floats = npt.NDArray[np.float64]
_Places = npt.NDArray[np.intp]
_MORE = 8
"""With constraints, candidates are drawn at most so many times, until enough are allowed."""
_MOST_METRICS = 2
"""With more metrics, Optuna's choice of trials from a front takes seconds for hundreds of them."""
_COMPLETE, _PRUNED, _RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING


class TrialTable:
    """What TPE reads of each trial: state, kind, score if pruned, violation, values, parameters.

    Trials of a kind have the same parameters.
    """

    def __init__(self, space: Mapping[str, BaseDistribution], num_metrics: int) -> None:
        self._space = space
        self._num_metrics = num_metrics
        self._column = {key: index for index, key in enumerate(space, 5 + num_metrics)}
        self._kinds: dict[frozenset[str], int] = {}
        self._trials: Sequence[FrozenTrial] = ()
        self._rows: _Floats = np.empty((0, 5 + num_metrics + len(space)))

    def read(self, trials: Sequence[FrozenTrial], sampler: TPESampler, study: Study) -> None:
        """Read those trials that are not the same objects as before."""
        rows = np.empty((len(trials), self._rows.shape[1]))
        known = min(len(trials), len(self._rows))
        rows[:known] = self._rows[:known]
        for place, trial in enumerate(trials):
            if place >= known or trial is not self._trials[place]:
                rows[place] = self._read(trial, sampler, study)
        self._trials, self._rows = trials, rows

    def _read(self, trial: FrozenTrial, sampler: TPESampler, study: Study) -> list[float]:
        params = sampler._get_params(trial, study)
        pruned = trial.state == _PRUNED
        return [
            trial.state,
            self._kinds.setdefault(frozenset(trial.params), len(self._kinds)),
            *(_get_pruned_trial_score(trial, study) if pruned else (np.nan, np.nan)),
            _get_infeasible_trial_score(trial),
            *(trial.values or (np.nan,) * self._num_metrics),
            *(
                one.to_internal_repr(params[key]) if key in params else np.nan
                for key, one in self._space.items()
            ),
        ]

    def places(self, *states: TrialState) -> _Places:
        """Return the places of the trials in one of the states, ascending."""
        return np.flatnonzero(np.isin(self._rows[:, 0], states))

    def examples(self, number: int) -> list[FrozenTrial]:
        """Return so many of the first ended trials, and the first one of each kind.

        From these few Optuna infers the same space as from all trials.
        """
        ended = self.places(_COMPLETE, _PRUNED)
        firsts = np.unique(self._rows[ended, 1], return_index=True)[1]
        chosen = np.unique(np.concatenate((ended[:number], ended[firsts])))
        return [self._trials[place] for place in chosen]

    def losses(self, places: _Places, directions: Sequence[StudyDirection]) -> _Floats:
        """Return the values of complete trials; less is better."""
        signs = [-1.0 if one == StudyDirection.MAXIMIZE else 1.0 for one in directions]
        losses: _Floats = self._rows[places, 5 : 5 + self._num_metrics] * signs
        return losses

    def violations(self, places: _Places) -> _Floats:
        """Return by how much trials violate constraints in all; 0 for a feasible one."""
        found: _Floats = self._rows[places, 4]
        return found

    def pruned_scores(self, places: _Places) -> _Floats:
        """Return the two numbers by which Optuna ranks pruned trials; less is better."""
        return self._rows[places, 2:4]

    def params(self, places: _Places, keys: Sequence[str]) -> _Floats:
        """Return the parameters, in Optuna's numbers, of the trials that have all of them."""
        found = self._rows[places][:, [self._column[key] for key in keys]]
        return found[~np.isnan(found).any(axis=1)]


class ArrayTPESampler(TPESampler):
    """Suggest what Optuna's TPE suggests for the trials of `learn_from`, which is called first."""

    allows: Callable[[Mapping[str, Any]], bool] | None = None
    """Returns whether a point with some of its values may be suggested. Known points are all
    allowed ones, so that what is forbidden looks untried, and its candidates would be the best."""
    _table: TrialTable
    _split: tuple[_Places, _Places] | None = None
    _drawn: dict[str, Any]
    """The values so far: groups of parameters are drawn one after the other."""

    def learn_from(
        self, trials: Sequence[FrozenTrial], study: Study, table: TrialTable
    ) -> list[FrozenTrial]:
        """Take all trials of a study, and return those that the study itself must have."""
        self._table, self._split, self._drawn = table, None, {}
        table.read(trials, self, study)
        return table.examples(self._n_startup_trials)

    def _sample(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if self._split is None:  # the same for each parameter of a trial
            self._split = self._below_and_above(study.directions)
        # Optuna passes the trials on to `_get_internal_repr`, as they are.
        imitated, avoided = cast(Any, self._split)
        below = self._build_parzen_estimator(study, search_space, imitated, handle_below=True)
        above = self._build_parzen_estimator(study, search_space, avoided, handle_below=False)
        samples = self._candidates(below, search_space, {**self._drawn, **trial.params})
        best = self._compare(samples, self._compute_acquisition_func(samples, below, above))
        drawn = {key: one.to_external_repr(best[key]) for key, one in search_space.items()}
        self._drawn.update(drawn)
        return drawn

    def _candidates(
        self,
        below: _ParzenEstimator,
        space: Mapping[str, BaseDistribution],
        point: Mapping[str, Any],
    ) -> dict[str, _Floats]:
        """Return candidates from the density of good trials, allowed ones if there are any."""
        count, generator = self._n_ei_candidates, self._rng.rng
        if self.allows is None:
            return below.sample(generator, count)
        found: dict[str, list[_Floats]] = {key: [] for key in space}
        num_allowed = 0
        for _ in range(_MORE):
            samples = below.sample(generator, count)
            allowed = [
                index
                for index in range(count)
                if self.allows({**point, **_external(samples, index, space)})
            ]
            for key, column in samples.items():
                found[key].append(column[allowed])
            num_allowed += len(allowed)
            if num_allowed >= count:
                break
        if not num_allowed:
            return samples
        return {key: np.concatenate(columns)[:count] for key, columns in found.items()}

    def _below_and_above(self, directions: Sequence[StudyDirection]) -> tuple[_Places, _Places]:
        """Return the places of the trials that TPE imitates, and of those that it avoids."""
        table = self._table
        ended = table.places(_COMPLETE, _PRUNED)
        violations = table.violations(ended)
        feasible, infeasible = ended[violations == 0], ended[violations > 0]
        complete, pruned = (
            np.intersect1d(feasible, table.places(state), assume_unique=True)
            for state in (_COMPLETE, _PRUNED)
        )
        default = default_gamma if len(directions) == 1 else default_gamma_multiobjective
        number = (self._gamma or default)(len(ended))
        best = complete[self._best(complete, directions, min(number, len(complete)))]
        ranked = pruned[np.lexsort(table.pruned_scores(pruned).T[::-1])]
        closest = infeasible[np.argsort(table.violations(infeasible), kind="stable")]
        below = np.sort(np.concatenate((best, ranked, closest))[:number])
        known = (_COMPLETE, _PRUNED, *[_RUNNING] * self._constant_liar)
        return below, np.setdiff1d(table.places(*known), below, assume_unique=True)

    def _best(
        self, complete: _Places, directions: Sequence[StudyDirection], number: int
    ) -> _Places:
        """Return which of the complete trials are the best, in any order."""
        losses = self._table.losses(complete, directions)
        if losses.shape[1] == 1:
            return np.argsort(losses[:, 0], kind="stable")[:number]
        if number in (0, len(losses)):
            return np.arange(number)
        best = np.empty(0, dtype=np.intp)
        for front in fronts(losses):
            left = number - len(best)
            taken = front if len(front) < left else front[_of_front(losses[front], left)]
            best = np.concatenate((best, taken))
            if len(best) == number:
                break
        return best

    def _get_internal_repr(
        self, trials: Any, search_space: dict[str, BaseDistribution], study: Study
    ) -> dict[str, _Floats]:
        del study
        found = self._table.params(trials, list(search_space))
        return dict(zip(search_space, found.T, strict=True))

    def _compute_acquisition_func(
        self,
        samples: dict[str, _Floats],
        mpe_below: _ParzenEstimator,
        mpe_above: _ParzenEstimator,
    ) -> _Floats:
        return _log_pdf(mpe_below, samples) - _log_pdf(mpe_above, samples)


def _external(
    samples: Mapping[str, _Floats], index: int, space: Mapping[str, BaseDistribution]
) -> dict[str, Any]:
    """Return one of several points in the form of a trial's parameters."""
    return {key: one.to_external_repr(samples[key][index]) for key, one in space.items()}


def _of_front(losses: _Floats, number: int) -> _Places:
    """Return which trials of a front are taken if not all of them are."""
    if losses.shape[1] > _MOST_METRICS:
        return spread(losses, number)
    return _solve_hssp_with_cache(
        tuple(losses.ravel()),
        tuple(range(len(losses))),
        number,
        tuple(_get_reference_point(losses)),
    )


def _log_pdf(estimator: _ParzenEstimator, samples: dict[str, _Floats]) -> _Floats:
    """Return what `estimator.log_pdf` returns, bit by bit, in a third of the time.

    Optuna computes all samples at once, in arrays that fit no cache, and looks in them for samples
    outside the space. A parameter with steps is left to it.
    """
    mixture, points = estimator._mixture_distribution, estimator._transform(samples)
    choices, columns, numeric = [], [], []
    for column, one in zip(points.T, mixture.distributions, strict=True):
        if isinstance(one, _BatchedCategoricalDistributions):
            choices.append((np.log(one.weights), column.astype(int)))
            continue
        columns.append(np.log(column) if one.is_log else column)
        numeric.append(one)
    low, high = (
        np.array([getattr(one, name) for one in numeric])[:, np.newaxis]
        for name in ("adapted_low", "adapted_high")
    )
    x = np.array(columns)
    if not numeric or any(one.step for one in numeric) or ((x < low) | (x > high)).any():
        return estimator.log_pdf(samples)
    mu, sigma = np.array([one.mu for one in numeric]), np.array([one.sigma for one in numeric])
    mass = _truncnorm._log_gauss_mass((low - mu) / sigma, (high - mu) / sigma)
    log_sigma, log_weights = np.log(sigma), np.log(mixture.weights)
    found = np.empty(len(points))
    for index, point in enumerate(x.T):
        logs = (point[:, np.newaxis] - mu) / sigma
        np.square(logs, out=logs)
        logs /= -2.0
        logs -= _truncnorm._norm_pdf_logC
        logs -= mass
        logs -= log_sigma
        # NumPy adds up to seven numbers in turn, and more of them in another order.
        total = logs.sum(axis=0) if len(logs) < 8 else np.ascontiguousarray(logs.T).sum(axis=1)
        total += sum(logs[:, picked[index]] for logs, picked in choices)
        total += log_weights
        most = total.max()
        found[index] = np.log(np.exp(total - most).sum()) + most
    return found
