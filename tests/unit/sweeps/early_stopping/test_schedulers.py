"""Schedulers: after replaying the past, a new one decides like the one before it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from sweeps.config.spec import EarlyStoppingConfig, parse_spec
from sweeps.early_stopping import halving
from sweeps.early_stopping.halving import bracket_graces, bracket_of, rungs
from sweeps.early_stopping.median import Medians
from sweeps.early_stopping.pausing_rules import make_pausing_rule
from sweeps.early_stopping.schedulers import replay, stopped_trials
from tests.unit.sweeps.early_stopping.simulated_sweep import EPOCHS, SimulatedSweep
from trainable.config import BudgetConfig

SPEC = parse_spec("{name: s, task: digits, metric: val/loss, mode: min, trials: 4}", "s.yaml")
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

    once = ASHA.rule.scheduler(epochs=9, mode=mode)
    for trial in curves:
        once.on_trial_add(None, SimpleNamespace(trial_id=trial))
        for epoch in range(1, told[trial] + 1):
            _tell(once, trial, epoch, curves[trial][epoch - 1])

    resumed = ASHA.rule.scheduler(epochs=9, mode=mode)
    for trial, epochs in told.items():
        reports = {epoch: curves[trial][epoch - 1] for epoch in range(1, epochs + 1)}
        replay(resumed, trial, reports, number=int(trial[1:]), finished=epochs == 9)
    assert _rungs(resumed) == _rungs(once)


def test_unfinished_trial_counts_once_on_its_rung() -> None:
    scheduler = ASHA.rule.scheduler(epochs=9, mode="min")
    replay(scheduler, "again", {1: 0.5, 2: 0.4, 3: 0.3}, number=0, finished=False)
    scheduler.on_trial_add(None, SimpleNamespace(trial_id="again"))
    before = _rungs(scheduler)
    _tell(scheduler, "again", 4, 0.2)
    assert _rungs(scheduler) == before


def test_a_bad_trial_is_stopped_at_a_rung_of_the_past() -> None:
    scheduler = ASHA.rule.scheduler(epochs=9, mode="min")
    for n, value in enumerate([0.1, 0.2, 0.3]):
        replay(scheduler, f"past-{n}", {1: value}, number=n, finished=True)
    scheduler.on_trial_add(None, SimpleNamespace(trial_id="new"))
    assert _tell(scheduler, "new", 1, 0.9) == TrialScheduler.STOP


def test_none_stops_nothing() -> None:
    scheduler = EarlyStoppingConfig(scheduler="none").rule.scheduler(epochs=9, mode="min")
    assert isinstance(scheduler, FIFOScheduler)
    replay(scheduler, "past", {1: 0.1, 2: 5.0}, number=0, finished=True)


EACH = [
    EarlyStoppingConfig(scheduler="asha", grace_epochs=1, reduction=2),
    EarlyStoppingConfig(scheduler="hyperband", grace_epochs=1, reduction=2),
    EarlyStoppingConfig(scheduler="median", grace_epochs=2, min_trials=2),
]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("config", EACH, ids=lambda config: config.scheduler)
def test_verdicts_after_any_kill_equal_those_of_one_driver(
    config: EarlyStoppingConfig, mode: Any
) -> None:
    rng = random.Random(1)
    curves = [[rng.random() + 1 / epoch for epoch in range(1, EPOCHS + 1)] for _ in range(8)]
    once = SimulatedSweep(config, mode, curves)
    once.run(dies_after=-1)
    stopped = [n for n, reports in once.reports.items() if max(reports) < EPOCHS]
    assert stopped, "the case shows nothing"
    assert len(stopped) < len(curves)
    for point in range(sum(map(len, once.reports.values()))):
        killed = SimulatedSweep(config, mode, curves)
        killed.run(dies_after=point)
        killed.run(dies_after=-1)
        assert killed.reports == once.reports, f"died after report {point}"


NOT_FINITE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("config", EACH, ids=lambda config: config.scheduler)
def test_non_finite_trial_stops_and_is_not_compared(
    config: EarlyStoppingConfig, value: float, mode: Any
) -> None:
    sound = [[0.1 * (n + 1)] * EPOCHS for n in range(6)]
    without = SimulatedSweep(config, mode, sound)
    without.run(dies_after=-1)
    # Each comes after the sound ones of its bracket, but for ASHA's very first.
    late = config.scheduler != "asha"
    curves = [*sound, *[[value] * EPOCHS] * 4] if late else [[value] * EPOCHS, *sound]
    beside = SimulatedSweep(config, mode, curves)
    beside.run(dies_after=-1)
    bad = range(6, 10) if late else range(1)
    graces = bracket_graces(1, 2, EPOCHS)
    for number in bad:
        of_bracket = graces[bracket_of(number, graces, 2)]
        rung = {"asha": 1, "hyperband": of_bracket, "median": 2}[config.scheduler]
        assert max(beside.reports[number]) == rung
    found = [max(beside.reports[n]) for n in range(len(curves)) if n not in bad]
    assert found == [max(reports) for reports in without.reports.values()]


@pytest.mark.parametrize("config", EACH[:2], ids=lambda config: config.scheduler)
def test_rung_of_non_finite_trials_stops_them_all(
    config: EarlyStoppingConfig,
) -> None:
    curves = [[NOT_FINITE[n % 3]] * EPOCHS for n in range(9)] + [[0.5] * EPOCHS] * 4
    once = SimulatedSweep(config, "min", curves)
    once.run(dies_after=-1)
    for point in range(0, sum(map(len, once.reports.values())), 3):
        killed = SimulatedSweep(config, "min", curves)
        killed.run(dies_after=point)
        killed.run(dies_after=-1)
        assert killed.reports == once.reports
    lengths = [max(reports) for reports in once.reports.values()]
    assert lengths[9:] == [EPOCHS] * 4
    last = len(bracket_graces(1, 2, EPOCHS)) - 1
    of = [bracket_of(n, bracket_graces(1, 2, EPOCHS), 2) for n in range(9)]
    full = [config.scheduler == "hyperband" and bracket == last for bracket in of]
    assert [length == EPOCHS for length in lengths[:9]] == full


@pytest.mark.parametrize("scheduler", ["asha", "asha_promote", "hyperband"])
@pytest.mark.parametrize("epochs", [2, 9, 10, 27])
def test_no_rung_lies_beyond_the_budget(scheduler: Any, epochs: int) -> None:
    config = EarlyStoppingConfig(scheduler=scheduler, grace_epochs=1, reduction=3)
    made: Any = config.rule.scheduler(epochs=epochs, mode="min")
    budget = BudgetConfig(epochs=epochs)
    ladder = make_pausing_rule(
        SPEC.model_copy(update={"early_stopping": config, "budget": budget})
    )
    expected = rungs(1, 3, epochs)
    if ladder is not None:
        assert ladder.rungs == expected
        return
    for bracket in getattr(made, "brackets", [made]):
        found = sorted(epoch for epoch, _ in bracket._brackets[0]._rungs if epoch < epochs)
        assert tuple(found) == tuple(epoch for epoch in expected if epoch >= _first_rung(bracket))


def _first_rung(bracket: Any) -> int:
    return int(min(epoch for epoch, _ in bracket._brackets[0]._rungs))


def test_trial_is_compared_within_its_bracket() -> None:
    scheduler = EACH[1].rule.scheduler(epochs=EPOCHS, mode="min")
    graces = bracket_graces(1, 2, EPOCHS)
    brackets = [bracket_of(number, graces, 2) for number in range(40)]
    for number in range(40):
        trial = SimpleNamespace(trial_id=str(number), config={"number": number})
        scheduler.on_trial_add(None, trial)
        verdict = scheduler.on_trial_result(None, trial, {"epoch": 1, "objective": float(number)})
        # each is worse than all before it; only the first of the most eager bracket goes on
        eager_before = brackets[:number].count(0)
        assert (verdict == TrialScheduler.STOP) == (brackets[number] == 0 and eager_before > 0)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({1: 9.0, 2: 0.9}, True),  # the others' means are 0.2, 0.4 and 0.8
        ({1: 9.0, 2: 0.3}, False),
        ({1: 9.0, 2: 0.4}, False),  # not worse than the median
        ({1: 0.3, 2: 9.0}, False),  # its best counts
        ({1: 9.0}, False),  # within the grace
        ({1: 9.0, 2: 0.9, 3: 0.9}, False),  # only one came as far
        ({1: float("nan"), 2: float("nan")}, True),
        ({2: float("inf"), 3: float("-inf")}, False),  # two that have no mean
        ({2: 1.7e308, 3: 1.7e308}, False),
    ],
)
def test_the_median_rule(own: dict[int, float], expected: bool) -> None:
    others = {0: {1: 5.0, 2: 0.2}, 1: {1: 5.0, 2: 0.4, 3: 0.4}, 2: {1: 5.0, 2: 0.8}}
    for sign, minimize in ((1, True), (-1, False)):
        medians = Medians(2, 3, minimize=minimize)
        for number, values in {**others, 7: own}.items():
            stops = [medians.stops(number, epoch, sign * values[epoch]) for epoch in values]
        assert stops[-1] == expected  # the last report of trial 7


@pytest.mark.parametrize("value", [0.1, 2.302585])
def test_median_rule_stops_no_equal_trial(value: float) -> None:
    for sign, minimize in ((1, True), (-1, False)):
        medians = Medians(1, 3, minimize=minimize)
        for epoch, number in itertools.product(range(1, 31), range(5)):
            assert not medians.stops(number, epoch, sign * value)


@pytest.mark.parametrize(
    ("scheduler", "owner", "name"),
    [("hyperband", halving, "brackets"), ("median", Medians, "_mean")],
)
def test_scheduler_cost_per_trial_is_constant(
    scheduler: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, worked = getattr(owner, name), []

    def work(done: Any) -> Any:
        worked.append(done)
        return done

    def counted(*told: Any) -> Any:
        found = real(*told)
        return map(work, found) if isinstance(found, Iterator) else work(found)

    monkeypatch.setattr(owner, name, counted)
    counts = []
    for trials, reduction in ((20, 7), (200, 8)):  # each with brackets that nobody asked for yet
        worked.clear()
        config = EarlyStoppingConfig(scheduler=scheduler, reduction=reduction)
        reports = {number: {1: 0.5, 2: 0.4} for number in range(trials)}
        stopped_trials(config.rule.scheduler(epochs=9, mode="min"), reports, {0})
        counts.append(len(worked))
    assert counts[1] <= 12 * counts[0]
