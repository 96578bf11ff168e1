"""Schedulers: a replayed past leaves the rungs that an uninterrupted driver would have."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from sweeps.schedulers import make_scheduler, replay
from sweeps.spec import EarlyStoppingConfig

ASHA = EarlyStoppingConfig(scheduler="asha", grace_epochs=1, reduction=3)


def _tell(scheduler: TrialScheduler, trial_id: str, epoch: int, value: float) -> str:
    result: dict[str, Any] = {"epoch": epoch, "objective": value}
    return str(scheduler.on_trial_result(None, SimpleNamespace(trial_id=trial_id), result))


def _rungs(scheduler: Any) -> list[tuple[int, list[float]]]:
    return [
        (milestone, sorted(recorded.values()))
        for milestone, recorded in scheduler._brackets[0]._rungs
    ]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_rungs_after_a_resume_equal_those_of_one_driver(mode: Any) -> None:
    rng = random.Random(0)
    curves = {f"t{n}": [rng.random() for _ in range(9)] for n in range(12)}
    told = {trial: rng.choice([1, 2, 3, 5, 9]) for trial in curves}

    once = make_scheduler(ASHA, epochs=9, mode=mode)
    for trial in curves:
        once.on_trial_add(None, SimpleNamespace(trial_id=trial))
        for epoch in range(1, told[trial] + 1):
            _tell(once, trial, epoch, curves[trial][epoch - 1])

    resumed = make_scheduler(ASHA, epochs=9, mode=mode)
    for trial, epochs in told.items():
        reports = {epoch: curves[trial][epoch - 1] for epoch in range(1, epochs + 1)}
        replay(resumed, trial, reports, finished=epochs == 9)
    assert _rungs(resumed) == _rungs(once)


def test_an_unfinished_trial_is_not_counted_twice_on_its_rung() -> None:
    scheduler = make_scheduler(ASHA, epochs=9, mode="min")
    replay(scheduler, "again", {1: 0.5, 2: 0.4, 3: 0.3}, finished=False)
    scheduler.on_trial_add(None, SimpleNamespace(trial_id="again"))
    before = _rungs(scheduler)
    _tell(scheduler, "again", 4, 0.2)
    assert _rungs(scheduler) == before


def test_a_bad_trial_is_stopped_at_a_rung_of_the_past() -> None:
    scheduler = make_scheduler(ASHA, epochs=9, mode="min")
    for n, value in enumerate([0.1, 0.2, 0.3]):
        replay(scheduler, f"past-{n}", {1: value}, finished=True)
    scheduler.on_trial_add(None, SimpleNamespace(trial_id="new"))
    assert _tell(scheduler, "new", 1, 0.9) == TrialScheduler.STOP


def test_none_stops_nothing() -> None:
    scheduler = make_scheduler(EarlyStoppingConfig(scheduler="none"), epochs=9, mode="min")
    assert isinstance(scheduler, FIFOScheduler)
    replay(scheduler, "past", {1: 0.1, 2: 5.0}, finished=True)
