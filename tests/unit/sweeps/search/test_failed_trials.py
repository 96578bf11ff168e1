"""What samplers learn from trials that failed."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.ledger.reasons import may_be_of_parameters
from sweeps.search.shown_trials import failures_as_worst
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.unit.sweeps.search.trial_history import search

NAN = "non_finite: val/loss is nan"
SPEC = """
name: s
task: digits
metric: val/loss
mode: {mode}
trials: 60
budget: {{epochs: 1}}
space:
  task.x: {{uniform: [0, 1]}}
search: {{sampler: {sampler}, startup_trials: 5}}
early_stopping: {{scheduler: none}}
"""
MINIMIZE, MAXIMIZE = StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE


def _trial(state: TrialState, values: list[float] | None = None, reason: str = "") -> FrozenTrial:
    return create_trial(
        state=state,
        values=values,
        params={"x": 0.5},
        distributions={"x": FloatDistribution(0, 1)},
        intermediate_values={} if state == TrialState.COMPLETE else {1: 0.0},
        user_attrs={"reason": reason} if reason else {},
    )


@pytest.mark.parametrize("make", [GPSampler, CmaEsSampler, NSGAIISampler])
def test_failed_trial_is_shown_with_the_worst_values(make) -> None:
    trials = [
        _trial(TrialState.COMPLETE, [0.1, 5.0]),
        _trial(TrialState.FAIL, reason=NAN),
        _trial(TrialState.COMPLETE, [0.9, 7.0]),
        _trial(TrialState.PRUNED),
    ]
    shown = failures_as_worst(trials, make(), startup=2, directions=[MINIMIZE, MAXIMIZE])
    assert [one.state.name for one in shown] == ["COMPLETE", "COMPLETE", "COMPLETE", "PRUNED"]
    assert shown[1].values == [0.9, 5.0]
    assert trials[1].state == TrialState.FAIL, "the ledger's trial remains as it was"


def test_failed_trial_ranks_behind_all_others_of_tpe() -> None:
    trials = [_trial(TrialState.PRUNED), _trial(TrialState.FAIL, reason=NAN)]
    shown = failures_as_worst(trials, TPESampler(), startup=1, directions=[MINIMIZE])[1]
    assert (shown.state, shown.intermediate_values) == (TrialState.PRUNED, {})


def test_failures_are_no_startup_trials() -> None:
    trials = [_trial(TrialState.FAIL, reason=NAN)] * 5 + [_trial(TrialState.COMPLETE, [0.5])]
    for sampler in (TPESampler(), GPSampler()):
        assert failures_as_worst(trials, sampler, startup=2, directions=[MINIMIZE]) == trials
        only = failures_as_worst(trials[:5], sampler, startup=0, directions=[MINIMIZE])
        assert only == trials[:5]


def test_unknown_sampler_sees_that_a_trial_failed() -> None:
    trials = [_trial(TrialState.COMPLETE, [0.5]), _trial(TrialState.FAIL, reason=NAN)]
    assert failures_as_worst(trials, RandomSampler(), startup=1, directions=[MINIMIZE]) == trials


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (NAN, True),
        ("oom: out of memory", True),
        ("ValueError: no such layer", True),
        ("config: train.batch_size is 0", True),
        ("hang: no step for 30 s", True),
        ("lost: its process was killed", False),
        ("limit: too many open files", False),
        ("checkpoint: cannot be read", False),
        ("task: there is no module", False),
        (None, False),
    ],
)
def test_only_failures_of_parameters_teach_the_sampler(reason: str | None, told: bool) -> None:
    assert may_be_of_parameters(reason) is told
    trials = [_trial(TrialState.COMPLETE, [0.5]), _trial(TrialState.FAIL, reason=reason or "")]
    shown = failures_as_worst(trials, TPESampler(), startup=1, directions=[MINIMIZE])
    assert (shown[1].state != TrialState.FAIL) is told


def _spec(sampler: str, mode: str = "min") -> SweepSpec:
    return parse_spec(SPEC.format(sampler=sampler, mode=mode), "s.yaml")


def _share_of_failing(sampler: str, mode: str, reason: str) -> float:
    """Which share of suggestions lies where each trial fails, beside the optimum at 0.4."""

    def ended(params: dict[str, Any]) -> float | str:
        loss = abs(params["task.x"] - 0.4)
        return reason if _fails(params) else loss if mode == "min" else -loss

    drawn = search(_spec(sampler, mode), 45, ended)[20:]
    return sum(map(_fails, drawn)) / len(drawn)


def _fails(params: dict[str, Any]) -> bool:
    return bool(0.4 < params["task.x"] < 0.6)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_tpe_leaves_the_place_where_trials_fail(mode) -> None:
    untold = _share_of_failing("tpe", mode, "lost: its process was killed")
    told = _share_of_failing("tpe", mode, NAN)
    assert told < untold / 1.5, (told, untold)
