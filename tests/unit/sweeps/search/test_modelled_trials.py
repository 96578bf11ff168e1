"""Which of many trials TPE models."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.config.spec import parse_spec
from sweeps.optuna_compat.storage import set_trial_id
from sweeps.search import modelled_trials as module
from sweeps.search.modelled_trials import MOST_MODELLED, modelled_trials
from sweeps.search.suggest import Suggester
from tests.unit.sweeps.search.trial_history import MadeHistory, search

SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 60
budget: {epochs: 1}
space:
  task.x: {uniform: [0, 1]}
search: {sampler: tpe, startup_trials: 5}
early_stopping: {scheduler: none}
"""
SPACE: dict[str, Any] = {"x": optuna.distributions.FloatDistribution(0, 1)}
COMPLETE, PRUNED, RUNNING, FAIL = (
    TrialState.COMPLETE,
    TrialState.PRUNED,
    TrialState.RUNNING,
    TrialState.FAIL,
)


def _history(count: int, *, seed: int = 0, states=(COMPLETE, PRUNED, RUNNING, FAIL)):
    draw, found = random.Random(seed), []
    for number in range(count):
        state = draw.choice(states)
        value, last = round(draw.random(), 3), draw.randint(0, 3)
        trial = create_trial(
            state=state,
            value=value if state == COMPLETE else None,
            params={"x": draw.random()},
            distributions=SPACE,
            intermediate_values={epoch: draw.random() for epoch in range(1, last + 1)},
        )
        trial.number = number
        set_trial_id(trial, number)
        found.append(trial)
    return found


def _best_by_optuna(trials: list[FrozenTrial], minimize: bool) -> list[int]:
    from optuna.samplers._tpe.sampler import _split_trials, default_gamma

    study = optuna.create_study(direction="minimize" if minimize else "maximize")
    known = [one for one in trials if one.state != FAIL]
    number = default_gamma(sum(one.state != RUNNING for one in known))
    return [one.number for one in _split_trials(study, known, number)[0]]


def test_few_trials_are_all_shown() -> None:
    trials = _history(MOST_MODELLED, states=(COMPLETE, PRUNED))
    assert modelled_trials(trials, minimize=True) == trials
    more = [*trials, *_history(50, states=(RUNNING, FAIL))]
    assert modelled_trials(more, minimize=True) == more, "those that run or failed do not count"


@pytest.mark.parametrize("minimize", [True, False])
@pytest.mark.parametrize("states", [(COMPLETE, PRUNED, RUNNING, FAIL), (PRUNED,)])
def test_best_trials_are_the_ones_that_optuna_takes(minimize, states) -> None:
    trials = _history(MOST_MODELLED + 500, states=states)
    shown = modelled_trials(trials, minimize=minimize, most=300)
    assert _best_by_optuna(shown, minimize) == _best_by_optuna(trials, minimize)


def test_others_are_chosen_evenly_and_in_order() -> None:
    trials = _history(4000)
    shown = modelled_trials(trials, minimize=True, most=400)
    numbers = [one.number for one in shown]
    assert numbers == sorted(set(numbers))
    assert sum(one.state in (COMPLETE, PRUNED) for one in shown) == 400
    running = [one.number for one in trials if one.state == RUNNING]
    assert [one.number for one in shown if one.state == RUNNING] == running
    ended = [one.number for one in trials if one.state in (COMPLETE, PRUNED)]
    assert ended[-1] in numbers
    best = _best_by_optuna(trials, True)
    kept = [number for number in ended if number in numbers and number not in best]
    quarters = [sum(low <= n < low + 1000 for n in kept) for low in range(0, 4000, 1000)]
    assert max(quarters) - min(quarters) < 20, quarters


def test_suggestions_stay_those_of_all_trials(monkeypatch) -> None:
    """Up to the limit the choice changes no suggestion; beyond it, it does."""
    spec = parse_spec(SPEC, "s.yaml")
    monkeypatch.setattr(module, "_BEST", 5)
    seen = {}
    for most in (20, 40, 10_000):
        limited = partial(modelled_trials, most=most)
        monkeypatch.setattr("sweeps.search.shown_trials.modelled_trials", limited)
        seen[most] = search(spec, 41, lambda params: abs(params["task.x"] - 0.3))
    assert seen[40] == seen[10_000]
    assert seen[20][:21] == seen[40][:21]
    assert seen[20] != seen[40]


def test_suggestions_are_those_of_a_new_driver() -> None:
    """What is kept of paused trials between two suggestions changes when they train on."""
    spec = parse_spec(
        SPEC.replace("epochs: 1", "epochs: 9").replace("none}", "asha_promote, grace_epochs: 1}"),
        "s.yaml",
    )
    history = MadeHistory(spec)
    kept, draw = Suggester(spec, history), random.Random(0)
    trials = history.frozen_trials()
    for number in range(30):
        suggestion = kept.propose(number)
        assert suggestion == Suggester(spec, history).propose(number)
        history.end(suggestion, 0.0)
        _report(trials, number, RUNNING, {1: draw.random()})
        if number % 3 == 2:
            other = number - draw.randint(1, 2)
            _report(trials, other, RUNNING, {1: 0.5, 2: 0.4, 3: draw.random()})
        if number % 7 == 6:
            _report(trials, number - 1, PRUNED, trials[number - 1].intermediate_values)


def _report(trials: list[FrozenTrial], number: int, state, reports: dict[int, float]) -> None:
    known = trials[number]
    new = create_trial(
        state=state,
        params=known.params,
        distributions=known.distributions,
        intermediate_values=reports,
        system_attrs=known.system_attrs,
    )
    new.number = number
    set_trial_id(new, number + 1)
    trials[number] = new
