"""The data of a report's figures, read once, and what the figures share.

What must not live here: drawing (`figures`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from statistics import quantiles
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.ledger.ledger import Ledger
from sweeps.ledger.trials import TrialSummary, of_search
from sweeps.paths import SweepPaths
from sweeps.spec.spec import SweepSpec
from sweeps.trust.findings import short_names
from sweeps.view.sweep_view import SweepView

COLOURS = {
    "complete": "#1a7f37",
    "pruned": "#8c959f",
    "failed": "#cf222e",
    "running": "#0969da",
    "waiting": "#bf8700",
}
MAX_POINTS = 200
"""The most points of one learning curve."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class SweepData:
    """The data of all figures, read once."""

    view: SweepView
    study: optuna.Study
    """The study with all metrics."""
    names: Mapping[str, str]
    """The names of parameters on axes, by full key."""
    states: Mapping[int, str]
    starts: Mapping[int, datetime]
    """When each trial started, in UTC."""
    curves: Mapping[int, Mapping[int, float]]
    values: Mapping[int, float]
    """The value of each trial of the search that has one, by the one definition of it; of a
    stopped trial that was trained to its end later, the value at that end."""
    stopped: Set[int]
    """Those of them that were stopped early."""
    compared: optuna.Study
    """Every trial of the sweep under its own number; those with a value are complete, and all
    others failed, so that figures leave them out."""

    @property
    def spec(self) -> SweepSpec:
        return self.view.spec

    @property
    def metric(self) -> str:
        """The first metric, which most figures show."""
        return self.spec.metrics[0]

    @property
    def scale(self) -> tuple[float, float] | None:
        """The ends of the axis of the trials' values; see `value_scale`."""
        return value_scale(self.values.values(), minimize=self.view.ledger.minimize)

    def whole_numbers(self, name: str) -> list[int] | None:
        """Return the values of a parameter that is one of a few whole numbers; None for others."""
        known = self.distributions(name)
        found = self.searched_range(name)
        if found is None or found[2] or not all(isinstance(d, IntDistribution) for d in known):
            return None
        low, high = int(found[0]), int(found[1])
        return list(range(low, high + 1)) if high - low <= _MOST_WHOLE else None

    @property
    def selected(self) -> list[FrozenTrial]:
        """The trials with a value."""
        return self.compared.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def counted(self) -> optuna.Study:
        """Return a study of the trials that can be the best, each complete with its values."""
        found = []
        for trial, record in zip(self.study.trials, self.view.records, strict=True):
            if record.has_result and record.values:
                complete = copy.copy(trial)
                complete.state, complete.values = TrialState.COMPLETE, list(record.values)
                if record.limits:  # Optuna draws infeasible trials pale
                    margins = record.limits.margins(record.judged)
                    complete.system_attrs = {**trial.system_attrs, "constraints": margins}
                found.append(complete)
        return make_study(found, self.view.ledger.minimizes)

    def distributions(self, name: str) -> list[BaseDistribution]:
        """Return the distributions of a parameter: of each trial, and of the current space."""
        found = [t.distributions[name] for t in self.study.trials if name in t.distributions]
        now = [self.spec.space[k].to_optuna() for k in self.spec.space if self.names[k] == name]
        return [*found, *now]

    def searched_range(self, name: str) -> tuple[float, float, bool] | None:
        """Return the whole searched range, and whether its scale is logarithmic.

        None for a parameter that is no range, and for one that was only partly a range.
        """
        known: list[Any] = self.distributions(name)
        if not known or any(isinstance(one, CategoricalDistribution) for one in known):
            return None
        low, high = min(one.low for one in known), max(one.high for one in known)
        return low, high, any(one.log for one in known) and low > 0


class NotEnough(Exception):
    """There is too little data for a figure; the message says what is missing."""


def read_sweep(paths: SweepPaths) -> SweepData:
    """Read the data of a sweep's figures."""
    view = SweepView(paths)
    drawn = (key for record in view.records for key in record.params)
    names = short_names(list(dict.fromkeys([*view.spec.space, *drawn])))
    stored = stored_trials(view)
    known = [_at_its_best(*pair, stored) for pair in zip(stored, view.records, strict=True)]
    low = view.ledger.minimizes
    study = make_study([_renamed(one, names, one.state, one.values) for one in known], low)
    states = {record.number: view.trial_state(record) for record in view.records}
    searched = [one for one in of_search(view.records) if states[one.number] != "failed"]
    finishing = {
        one.finishes: one for one in view.records if one.finishes is not None and one.has_result
    }
    ended = {one.number: finishing.get(one.number, one) for one in searched}
    values = {
        number: one.value
        for number, one in ended.items()
        if one.value is not None and math.isfinite(one.value)
    }
    shown = [
        _renamed(one, names, TrialState.COMPLETE, [values[number]])
        if number in values
        else _renamed(one, names, TrialState.FAIL, None)
        for number, one in enumerate(known)
    ]
    return SweepData(
        view,
        study,
        names,
        states,
        {t.number: t.datetime_start for t in stored if t.datetime_start is not None},
        view.ledger.reports(),
        values,
        {number for number in values if ended[number].state == "pruned"},
        make_study(shown, low[:1]),
    )


def _at_its_best(
    trial: FrozenTrial, record: TrialSummary, others: Sequence[FrozenTrial]
) -> FrozenTrial:
    """Return a trial with the parameters of its best value, if they changed while it trained."""
    if not record.lineage:
        return trial
    drawn = {key: one for other in others for key, one in other.distributions.items()}
    shown = copy.copy(trial)
    shown.params = {key: value for key, value in record.best_params.items() if key in drawn}
    shown.distributions = {key: drawn[key] for key in shown.params}
    return shown


def _renamed(
    trial: FrozenTrial,
    names: Mapping[str, str],
    state: TrialState,
    values: Sequence[float] | None,
) -> FrozenTrial:
    return create_trial(
        state=state,
        values=values,
        params={names[key]: value for key, value in trial.params.items()},
        distributions={names[key]: value for key, value in trial.distributions.items()},
    )


def spans_decades(values: Iterable[float]) -> bool:
    """Return whether values need a logarithmic axis."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 10 * min(finite)


_FEWEST_OF_A_SCALE = 8
_MOST_WHOLE = 10


def value_scale(values: Iterable[float], *, minimize: bool) -> tuple[float, float] | None:
    """Return the ends of a linear axis that a few bad values would squash; None if none would.

    Bad are values worse than the worse quartile by three times the distance of the quartiles:
    Tukey, "Exploratory Data Analysis" (1977).
    """
    sign = 1 if minimize else -1
    losses = sorted(sign * value for value in values if math.isfinite(value))
    if len(losses) < _FEWEST_OF_A_SCALE or spans_decades(sign * one for one in losses):
        return None
    good, _, bad = quantiles(losses, n=4)
    inside = [one for one in losses if one <= bad + 3 * (bad - good)]
    extent = inside[-1] - inside[0]
    if not extent or losses[-1] - losses[0] < 2 * extent:
        return None
    low, high = sorted((sign * inside[0], sign * inside[-1]))
    return low, high


def thinned(points: Sequence[_T], most: int = MAX_POINTS) -> list[_T]:
    """Return at most `most` of the points, evenly spaced, with the first and the last."""
    step = max(1, math.ceil((len(points) - 1) / (most - 1)))
    kept = list(points[::step])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def copy_study(view: SweepView) -> optuna.Study:
    """Return a study in memory with the sweep's trials, under the sweep's name."""
    return make_study(stored_trials(view), view.ledger.minimizes, view.paths.name)


def stored_trials(view: SweepView) -> list[FrozenTrial]:
    """Return the trials as Optuna has them, without those added after the view was read."""
    return Ledger.open(view.paths.ledger).frozen_trials()[: len(view.records)]


def make_study(
    trials: Iterable[FrozenTrial], minimizes: Sequence[bool], name: str | None = None
) -> optuna.Study:
    """Return a study in memory."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would announce the study
    try:
        up, down = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
        directions = [down if low else up for low in minimizes]
        study = optuna.create_study(study_name=name, directions=directions)
    finally:
        optuna.logging.set_verbosity(level)
    study.add_trials(trials)
    return study
