"""Early stopping by several metrics: ranks at rungs, reasons, resumes."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.spec.sections import EarlyStoppingConfig
from sweeps.spec.spec import parse_spec
from sweeps.stopping.asha import FrontStopper, HalvingStopper
from sweeps.stopping.halving import SuccessiveHalving, goes_on_among_equals
from sweeps.stopping.rule import Standing
from sweeps.stopping.schedulers import make_verdict_fn
from tests.unit.sweeps.stopping.simulated_sweep import EPOCHS, SimulatedSweep

VALUES = st.floats(0, 1) | st.sampled_from([0.25, 0.5])


@given(st.lists(VALUES, min_size=1, max_size=40), st.integers(2, 4))
def test_two_equal_metrics_decide_like_one(values: list[float], reduction: int) -> None:
    """But for the interpolation, which lets some more trials continue."""
    one = HalvingStopper([[1]], reduction, minimize=False)
    two = FrontStopper([[1]], reduction, minimize=(False, False))
    for number, value in enumerate(values):
        better = sum(other > value for other in values[:number])
        alike = values[:number].count(value) + 1
        most = max(1, math.ceil(number / reduction))
        stops = two.stops(number, 1, (value, value)) is not None
        if better < most < better + alike:
            assert stops != goes_on_among_equals(number + 1, reduction)
        else:
            assert stops == (better >= most)
        assert stops or one.stops(number, 1, value) is None
        one.stops(number, 1, value)


def test_reason_names_the_rank_and_who_is_better() -> None:
    stopper = FrontStopper([[1]], 2, minimize=(True, False))
    assert stopper.stops(0, 1, (0.2, 10.0)) is None
    assert stopper.stops(1, 1, (0.1, 5.0)) is None, "no other is better in both"
    why = stopper.stops(2, 1, (0.3, 4.0))
    better = "trials 0 and 1 are at least as good in every metric"
    assert why == f"needed rank 1 to be in the best 1/2 so far, rank 3 of 3: {better}"
    assert stopper.stops(2, 2, (9.0, 0.0)) is None, "the same rung is not compared twice"
    assert stopper.stops(3, 1, (math.nan, 4.0)) == "not all finite numbers"
    for number in range(4, 9):
        stopper.stops(number, 1, (0.05 + number / 1000, 11.0 + number / 1000))
    why = stopper.stops(9, 1, (0.0545, 11.0045))
    assert why is not None
    assert "others add more hypervolume" in why, "it is on the front, which is full"


def test_reason_leaves_out_trials_of_a_better_front_that_are_worse_in_a_metric() -> None:
    stopper = FrontStopper([[1]], 3, minimize=(True, False))
    stopper.stops(0, 1, (0.2, 10.0))
    stopper.stops(1, 1, (0.1, 1.0))
    why = stopper.stops(2, 1, (0.3, 4.0))
    assert why is not None
    assert why.endswith(": trial 0 is at least as good in every metric")


def _curves(count: int, seed: int = 3) -> list[list[tuple[float, ...]]]:
    rng = random.Random(seed)
    ends = [(rng.random(), rng.random()) for _ in range(count)]
    return [
        [
            (a + rng.random() / epoch, 1 - b - rng.random() / epoch)
            for epoch in range(1, EPOCHS + 1)
        ]
        for a, b in ends
    ]


@pytest.mark.parametrize("scheduler", ["asha", "hyperband"])
@pytest.mark.parametrize("exempt", [frozenset(), frozenset({2, 5})], ids=["none", "exempt"])
def test_several_metrics_resume_as_if_uninterrupted(
    scheduler: Any, exempt: frozenset[int]
) -> None:
    config = EarlyStoppingConfig(scheduler=scheduler, grace_epochs=1, reduction=2)
    once = SimulatedSweep(config, ("min", "max"), _curves(10), exempt)
    once.run(dies_after=-1)
    lengths = {number: max(reports) for number, reports in once.reports.items()}
    stopped = {number for number, length in lengths.items() if length < EPOCHS}
    assert 2 <= len(stopped) < 10
    assert not stopped & exempt
    for point in range(sum(lengths.values())):
        killed = SimulatedSweep(config, ("min", "max"), _curves(10), exempt)
        killed.run(dies_after=point)
        killed.run(dies_after=-1)
        assert killed.reports == once.reports, f"died after report {point}"
        assert killed.would_stop == once.would_stop


@pytest.mark.parametrize("mode", ["min", ("min", "max")])
def test_exempt_trials_change_nothing_for_others(mode: Any) -> None:
    curves = _curves(12)
    if mode == "min":
        curves = [[one[0] for one in curve] for curve in curves]  # type: ignore[misc]
    config = EarlyStoppingConfig(scheduler="asha", grace_epochs=1, reduction=2)
    plain = SimulatedSweep(config, mode, curves)
    plain.run(dies_after=-1)
    lengths = {number: max(reports) for number, reports in plain.reports.items()}
    beside = SimulatedSweep(config, mode, curves, frozenset({1, 4, 7}))
    beside.run(dies_after=-1)
    for number, reports in beside.reports.items():
        assert max(reports) == (EPOCHS if number in (1, 4, 7) else lengths[number])
    early = {n: lengths[n] for n in (1, 4, 7) if lengths[n] < EPOCHS}
    assert early, "the case shows nothing"
    assert {n: one.epoch for n, one in beside.would_stop.items()} == early, (
        "where they would have been stopped is noted"
    )


def test_promotion_ranks_by_all_metrics() -> None:
    halving = SuccessiveHalving(rungs=(1, 2), minimize=(True, False), num_trials=4, reduction=2)
    reports: dict[int, dict[int, Any]] = {
        0: {1: (0.5, 5.0)}, 1: {1: (0.4, 9.0)}, 2: {1: (0.1, 6.0)}, 3: {1: (0.9, 1.0)},
    }  # fmt: skip
    first = halving.next_promotion(Standing(reports, {0, 1, 2, 3}))
    assert first in (1, 2), "those that none is better than"
    second = halving.next_promotion(Standing(reports, {0, 1, 2, 3}, live={first}))
    assert {first, second} == {1, 2}
    assert halving.next_promotion(Standing(reports, {0, 1, 2, 3}, live={1, 2})) is None
    reports[4] = {1: (math.nan, 9.0)}
    assert halving.next_promotion(Standing({4: reports[4], 5: {1: (1.0, 1.0)}}, {4, 5})) == 5


def test_exempt_trial_takes_no_place_of_a_promotion() -> None:
    halving = SuccessiveHalving(rungs=(1, 2), minimize=True, num_trials=4, reduction=2)
    bad: dict[int, dict[int, Any]] = {0: {1: 0.9, 2: 0.9}, 1: {1: 0.2}, 2: {1: 0.3}, 3: {1: 0.4}}
    assert halving.next_promotion(Standing(bad, {0, 1, 2, 3}, {0}, frozenset({0}))) == 1
    bad[1][2], bad[2][2] = 0.2, 0.3
    done = halving.next_promotion(Standing(bad, {0, 1, 2, 3}, {0}, frozenset({0})))
    assert done == 1, "at rung 2 there are two, without the exempt one"
    good: dict[int, dict[int, Any]] = {0: {1: 0.1, 2: 0.1}, 1: {1: 0.2}, 2: {1: 0.3}, 3: {1: 0.4}}
    assert halving.next_promotion(Standing(good, {0, 1, 2, 3}, {0}, frozenset({0}))) == 1
    good[1][2] = 0.2
    assert halving.next_promotion(Standing(good, {0, 1, 2, 3}, {0, 1}, frozenset({0}))) is None
    waiting = {number: {1: 0.1 * number} for number in range(4)}
    assert (
        halving.never_promoted(Standing(waiting, {0, 1, 2, 3}, exempt=frozenset({0})))
        == frozenset()
    )


def test_rest_at_the_end_has_a_reason_with_all_metrics() -> None:
    spec = parse_spec(
        "{name: s, task: digits, metric: [val/loss, val/accuracy], mode: [min, max], trials: 3, "
        "early_stopping: {scheduler: asha_promote, reduction: 2}}",
        "s.yaml",
    )
    reports = {
        0: dict.fromkeys(range(1, 11), (0.1, 0.9)), 1: {1: (0.4, 0.5)}, 2: {1: (0.3, 0.4)},
    }  # fmt: skip
    found = make_verdict_fn(spec)(Standing(reports, {1, 2}, complete={0}))
    assert found.keys() == {1, 2}
    assert found[1].startswith("asha_promote at epoch 1: val/loss 0.4, val/accuracy 0.5, never")
