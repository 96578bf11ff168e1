"""With several seeds, a rule compares configurations by their values over seeds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import TrialScheduler

from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.stopping.rule import Standing
from sweeps.stopping.schedulers import make_scheduler, make_verdict_fn
from sweeps.stopping.seed_means import over_seeds

SPEC = """
name: quad
task: digits
metric: val/loss
mode: min
trials: 9
repeats: {seeds: 3, value: mean}
budget: {epochs: 9}
space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}
early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 2}
"""


def _spec(*overrides: str) -> SweepSpec:
    return parse_spec(SPEC, "quad.yaml", overrides)


def _report(scheduler: Any, number: int, epoch: int, value: float, repeats: Any = None) -> bool:
    config = {"number": number, "role": "search" if repeats is None else "repeat"}
    trial = SimpleNamespace(trial_id=f"t{number}", config={**config, "origin": repeats})
    scheduler.on_trial_add(None, trial)
    result = {"epoch": epoch, "objective": value}
    return bool(scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP)


def test_report_is_over_the_seeds_that_reached_it() -> None:
    reports = {0: {1: 1.0, 2: 3.0}, 1: {1: 2.0}, 2: {1: 6.0, 2: 5.0}}
    found = over_seeds(reports, {2: 0}, lambda values: sum(values) / len(values))
    assert found == {0: {1: 3.5, 2: 4.0}, 1: {1: 2.0}}


@pytest.mark.parametrize("rule", ["asha", "median"])
def test_further_seeds_move_the_bar_for_others(rule: str) -> None:
    """The first seed of configuration 0 was lucky: 1.0, and 3.0 with the second seed."""
    overrides = [f"early_stopping.scheduler={rule}", "early_stopping.min_trials=1"]
    spec = _spec(*(overrides if rule == "median" else overrides[:1]))

    def stops(*seeds: float) -> bool:
        scheduler = make_scheduler(spec)
        _report(scheduler, 0, 1, 1.0)
        for number, value in enumerate(seeds, start=1):
            assert not _report(scheduler, number, 1, value, repeats=0)
        return _report(scheduler, 7, 1, 1.5)

    assert stops()
    assert not stops(3.0)
    assert stops(3.0, -1.2)


def test_brackets_count_configurations() -> None:
    """Trials 1 to 6 are further seeds, so that 7 is the second configuration."""
    one, three = (_spec("early_stopping.scheduler=hyperband", f"repeats={n}") for n in (1, 3))
    plain, with_seeds = make_scheduler(one), make_scheduler(three)
    for number in range(1, 7):
        _report(with_seeds, number, 9, 1.0, repeats=0)
    numbers = [0, *range(7, 20)]
    for place, number in enumerate(numbers):
        config = {"number": number, "place": place}
        with_seeds.on_trial_add(None, SimpleNamespace(config=config))
    curves = [[(epoch, 5.0 + position) for epoch in range(1, 4)] for position in range(14)]
    expected, found = (
        [
            [_report(scheduler, number, *point) for point in curve]
            for number, curve in zip(named, curves, strict=True)
        ]
        for scheduler, named in ((plain, range(14)), (with_seeds, numbers))
    )
    assert found == expected
    assert any(map(any, found))
    assert not all(map(any, found[1:]))


def test_further_seed_is_never_stopped() -> None:
    scheduler = make_scheduler(_spec())
    _report(scheduler, 0, 1, 1.0)
    _report(scheduler, 1, 1, 0.9)
    assert not _report(scheduler, 2, 1, 50.0, repeats=1)


def test_median_of_the_seeds_is_compared_if_asked_for() -> None:
    scheduler = make_scheduler(_spec("repeats.value=median"))
    _report(scheduler, 0, 1, 1.0)
    for number, value in ((1, 1.1), (2, 50.0)):
        _report(scheduler, number, 1, value, repeats=0)
    assert _report(scheduler, 7, 1, 1.5)


def test_next_driver_decides_by_the_same_values() -> None:
    """The driver died after trial 7's report, before it stopped the trial."""
    reports = {0: {1: 1.0}, 1: {1: 3.0}, 2: {1: -1.2}, 7: {1: 1.5}}
    spec, origins = _spec(), {1: 0, 2: 0}
    verdict = make_verdict_fn(spec, origins)
    assert verdict(Standing(reports, {7})).keys() == {7}
    lucky = {**reports, 2: {1: 3.0}}
    assert verdict(Standing(lucky, {2, 7})) == {}
    scheduler = make_scheduler(spec)
    scheduler.join(origins)
    for number, past in lucky.items():
        if number != 7:
            scheduler.replay(number, past, repeats=origins.get(number))
    assert not _report(scheduler, 7, 1, 1.5)


def test_paused_configurations_are_ranked_over_seeds() -> None:
    """Configurations 3 and 4 wait at a rung; 0 has trained to its end with one more seed."""
    spec = _spec("early_stopping.scheduler=asha_promote", "trials=3")
    reports = {0: {1: 1.0, 2: 1.0, 4: 1.0, 9: 1.0}, 1: {1: 9.0}, 3: {1: 2.0}, 4: {1: 4.0}}
    stopped = make_verdict_fn(spec, {1: 0})(Standing(reports, {1, 3, 4}, complete={0}))
    assert stopped.keys() <= {3, 4}
    assert "rank 1 of 3" in stopped[3]  # 0 has the mean 5.0 at this rung
    assert "rank 2 of 3" in stopped[4]
