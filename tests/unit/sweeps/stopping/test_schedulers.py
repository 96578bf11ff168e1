"""Schedulers: after replaying the past, a new one decides like the one before it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from sweeps.spec.sections import EarlyStoppingConfig
from sweeps.spec.spec import parse_spec
from sweeps.stopping import halving
from sweeps.stopping.asha import HalvingStopper
from sweeps.stopping.halving import bracket_graces, bracket_of
from sweeps.stopping.median import Medians
from sweeps.stopping.rule import Standing
from sweeps.stopping.schedulers import (
    StopperScheduler,
    WouldStop,
    make_scheduler,
    make_verdict_fn,
    stopped_trials,
)
from tests.unit.sweeps.stopping.simulated_sweep import EPOCHS, SimulatedSweep
from trainable.config import BudgetConfig

SPEC = parse_spec("{name: s, task: digits, metric: val/loss, mode: min, trials: 4}", "s.yaml")
ASHA = EarlyStoppingConfig(scheduler="asha", grace_epochs=1, reduction=3)


def _scheduler(config: EarlyStoppingConfig, mode: Any, epochs: int = 9) -> StopperScheduler:
    changes = {"early_stopping": config, "mode": mode, "budget": BudgetConfig(epochs=epochs)}
    return make_scheduler(SPEC.model_copy(update=changes))


def _report(scheduler: TrialScheduler, number: int, epoch: int, value: float) -> str:
    trial = SimpleNamespace(trial_id=str(number), config={"number": number})
    result: dict[str, Any] = {"epoch": epoch, "objective": value}
    return str(scheduler.on_trial_result(None, trial, result))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("grace", "reduction"), [(1, 3), (1, 2), (2, 4)])
def test_asha_decides_as_that_of_ray_does(mode: Any, grace: int, reduction: int) -> None:
    """Ray's scheduler sees the same reports, in the order in which running trials make them."""
    epochs, rng = 40, random.Random(grace * reduction)
    theirs: Any = ASHAScheduler(
        time_attr="epoch", metric="objective", mode=mode, max_t=epochs, grace_period=grace,
        reduction_factor=reduction, stop_last_trials=False,
    )  # fmt: skip
    config = EarlyStoppingConfig(scheduler="asha", grace_epochs=grace, reduction=reduction)
    ours = _scheduler(config, mode, epochs)
    last_rung = max(config.rule.rungs(epochs))
    running: dict[int, int] = {}
    waiting, num_stopped = list(range(300)), 0
    while waiting or running:
        while waiting and len(running) < 7:
            number = waiting.pop()
            theirs.on_trial_add(None, SimpleNamespace(trial_id=str(number)))
            running[number] = 0
        number = rng.choice(sorted(running))
        running[number] += 1
        value = rng.random()  # of equal ones Ray's lets all continue
        verdict = _report(theirs, number, running[number], value)
        assert _report(ours, number, running[number], value) == verdict
        num_stopped += verdict == TrialScheduler.STOP
        if verdict == TrialScheduler.STOP or running[number] == last_rung:
            del running[number]
    assert 50 < num_stopped < 300


def test_asha_says_why_it_stops_a_trial() -> None:
    for mode, words in (("min", "at most"), ("max", "at least")):
        scheduler = _scheduler(ASHA, mode)
        for number in range(11):
            _report(scheduler, number, 1, float(number))
        scheduler.stop_reasons.clear()
        worse = 8.5 if mode == "min" else 1.5
        assert _report(scheduler, 11, 1, worse) == TrialScheduler.STOP
        needed = "3.333" if mode == "min" else "6.667"
        assert scheduler.stop_reasons == {
            11: f"asha at epoch 1: val/loss {worse}, needed {words} {needed} to be in the best "
            "1/3 so far, rank 10 of 12"
        }
        assert _report(scheduler, 12, 1, math.nan) == TrialScheduler.STOP
        assert scheduler.stop_reasons[12] == "asha at epoch 1: val/loss nan, not a finite number"


def test_median_says_why_it_stops_a_trial() -> None:
    scheduler = _scheduler(EarlyStoppingConfig(scheduler="median", min_trials=3), "min")
    for number in range(3):
        assert _report(scheduler, number, 1, float(number)) == TrialScheduler.CONTINUE
    assert _report(scheduler, 3, 1, 5.0) == TrialScheduler.STOP
    reason = "median at epoch 1: val/loss 5, best 5, needed at most 1, the median of 3 others"
    assert scheduler.stop_reasons == {3: reason}


def test_promotion_says_which_rank_was_not_promoted() -> None:
    config = EarlyStoppingConfig(scheduler="asha_promote", reduction=2)
    spec = SPEC.model_copy(update={"early_stopping": config, "trials": 4})
    reports = {0: {1: 0.1, 2: 0.1}, 1: {1: 0.4}, 2: {1: 0.2, 2: 0.3}, 3: {1: 0.3}}
    whole = {**reports, 0: dict.fromkeys(range(1, 11), 0.1)}
    assert make_verdict_fn(spec)(Standing(whole, {1, 2, 3}, complete={0})) == {
        1: "asha_promote at epoch 1: val/loss 0.4, never promoted, rank 4 of 4",
        2: "asha_promote at epoch 2: val/loss 0.3, never promoted, rank 2 of 2",
        3: "asha_promote at epoch 1: val/loss 0.3, never promoted, rank 3 of 4",
    }


@pytest.mark.parametrize("mode", ["min", "max"])
def test_unfinished_trial_counts_once_on_its_rung(mode: Any) -> None:
    scheduler = _scheduler(ASHA, mode)
    scheduler.replay(0, {1: 0.5, 2: 0.4, 3: 0.3})
    for epoch in (1, 3, 4):  # a trial repeats epochs after a crash
        assert _report(scheduler, 0, epoch, 0.9) == TrialScheduler.CONTINUE
    _report(scheduler, 1, 3, 0.9 if mode == "min" else -0.9)
    assert scheduler.stop_reasons[1].endswith("rank 2 of 2")


def test_none_stops_nothing() -> None:
    scheduler = _scheduler(EarlyStoppingConfig(scheduler="none"), "min")
    assert scheduler.replay(0, {1: 0.1, 2: 5.0}) is None


EACH = [
    EarlyStoppingConfig(scheduler="asha", grace_epochs=1, reduction=2),
    EarlyStoppingConfig(scheduler="hyperband", grace_epochs=1, reduction=2),
    EarlyStoppingConfig(scheduler="median", grace_epochs=2, min_trials=2),
]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("step", [1e-9, 0.25], ids=["", "ties"])
@pytest.mark.parametrize("config", EACH, ids=lambda config: config.scheduler)
def test_verdicts_after_any_kill_equal_those_of_one_driver(
    config: EarlyStoppingConfig, mode: Any, step: float
) -> None:
    rng = random.Random(1)
    curves = [[rng.random() + 1 / epoch for epoch in range(1, EPOCHS + 1)] for _ in range(8)]
    curves = [[round(value / step) * step for value in curve] for curve in curves]
    once = SimulatedSweep(config, mode, curves)
    once.run(dies_after=-1)
    stopped = [n for n, reports in once.reports.items() if max(reports) < EPOCHS]
    assert stopped or (config.scheduler, step) == ("median", 0.25), "the case shows nothing"
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
    curves = [[NOT_FINITE[n % 3]] * EPOCHS for n in range(9)] + [
        [0.5 - n / 10] * EPOCHS for n in range(4)
    ]
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


def test_trial_is_compared_within_its_bracket() -> None:
    scheduler = _scheduler(EACH[1], "min", EPOCHS)
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
        assert (stops[-1] is not None) == expected  # the last report of trial 7


@pytest.mark.parametrize("reduction", [2, 3, 4])
@pytest.mark.parametrize("mode", ["min", ("min", "max")], ids=["one", "several"])
@pytest.mark.parametrize("scheduler", ["asha", "hyperband"])
def test_of_equal_trials_one_in_reduction_continues(
    scheduler: Any, mode: Any, reduction: int
) -> None:
    """On a flat function as on any other, and not the first trial alone."""
    config = EarlyStoppingConfig(scheduler=scheduler, grace_epochs=1, reduction=reduction)
    value: Any = 0.5 if mode == "min" else (0.5, 0.9)
    sweep = SimulatedSweep(config, mode, [[value] * EPOCHS] * 120)
    sweep.run(dies_after=-1)
    graces = bracket_graces(1, reduction, EPOCHS)
    for index, grace in enumerate(graces[:-1]):
        mine = [
            max(reports)
            for number, reports in sweep.reports.items()
            if scheduler == "asha" or bracket_of(number, graces, reduction) == index
        ]
        past = sum(epoch > grace for epoch in mine)
        assert past == max(1, math.ceil((len(mine) - 1) / reduction)), (grace, len(mine))
        if scheduler == "asha":
            break


@pytest.mark.parametrize("sign", [1, -1])
def test_better_trials_pass_a_crowd_of_equal_ones(sign: int) -> None:
    """As where most trials have not begun to learn at the first rung."""
    stopper = HalvingStopper([[1]], 3, minimize=sign > 0)
    values = [2.3] * 30 + [2.0, 2.4, 1.9]
    stops = [stopper.stops(number, 1, sign * value) for number, value in enumerate(values)]
    assert stops.count(None) == 1 + 9 + 2
    assert stops[30] is stops[32] is None
    assert stops[1] is not None
    assert "rank 1 of 2" in stops[1]
    assert stops[31] is not None


@pytest.mark.parametrize("value", [0.1, 2.302585])
def test_median_rule_stops_no_equal_trial(value: float) -> None:
    for sign, minimize in ((1, True), (-1, False)):
        medians = Medians(1, 3, minimize=minimize)
        for epoch, number in itertools.product(range(1, 31), range(5)):
            assert medians.stops(number, epoch, sign * value) is None


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
        stopped_trials(_scheduler(config, "min"), reports, {0})
        counts.append(len(worked))
    assert counts[1] <= 12 * counts[0]


def _mixed_order(count: int, at_once: int, rng: random.Random) -> list[int]:
    """Return which trial reports next, with so many of them at once."""
    waiting, left, order = list(range(count)), dict[int, int](), []
    while waiting or left:
        while waiting and len(left) < at_once:
            left[waiting.pop(rng.randrange(min(2, len(waiting))))] = EPOCHS
        order.append(rng.choice(sorted(left)))
        left[order[-1]] -= 1
        left = {number: rest for number, rest in left.items() if rest}
    return order


@pytest.mark.parametrize("step", [1e-9, 0.25], ids=["", "ties"])
@pytest.mark.parametrize(
    ("config", "mode"),
    [
        *((config, "min") for config in EACH),
        *((config, ("min", "max")) for config in EACH if not config.rule.needs_one_metric),
    ],
)
def test_exempt_trials_beside_each_other_resume_as_if_uninterrupted(
    config: EarlyStoppingConfig, mode: Any, step: float
) -> None:
    """Trials report in another order than that of their numbers, in which a replay passes them."""
    num_spared = 0
    for seed in range(4):
        rng = random.Random(seed)
        curves: Any = [
            [tuple(round(rng.random() / step) * step for _ in mode) for _ in range(EPOCHS)]
            for _ in range(9)
        ]
        if mode == "min":
            curves = [[one[0] for one in curve] for curve in curves]
        exempt = frozenset(rng.sample(range(9), 4))
        case = (config, mode, curves, exempt, _mixed_order(9, 4, rng))
        once = SimulatedSweep(*case)
        once.run(dies_after=-1)
        num_spared += len(once.would_stop)
        for point in range(sum(map(len, once.reports.values()))):
            for decides in (False, True):
                killed = SimulatedSweep(*case)
                killed.run(dies_after=point, decides=decides)
                killed.run(dies_after=-1)
                which = f"seed {seed}, died at report {point}, {decides=}"
                assert killed.would_stop == once.would_stop, which
                assert killed.reports == once.reports, which
    assert num_spared > 1, "the case shows nothing"


def test_exempt_trial_counts_nowhere_after_it_would_have_stopped() -> None:
    """The ledger knows where, though a replay in another order would not stop it there."""
    scheduler = _scheduler(ASHA, "min")
    scheduler.replay(0, {}, would_stop=WouldStop(1, "asha"))
    trial = SimpleNamespace(trial_id="0", config={"number": 0, "exempt": True})
    for epoch in (1, 3):
        result = {"epoch": epoch, "objective": 0.0}
        assert scheduler.on_trial_result(None, trial, result) == TrialScheduler.CONTINUE
    assert _report(scheduler, 1, 3, 5.0) == TrialScheduler.CONTINUE, "the first at its rung"
    assert _report(scheduler, 2, 3, 9.0) == TrialScheduler.STOP
