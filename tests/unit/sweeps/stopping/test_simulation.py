"""How long the trials of a sweep train, by a simulation of its stopping rule."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sweeps.spec.sections import early_stopping_section
from sweeps.stopping.registry import RULES
from sweeps.stopping.rule import StoppingRule
from sweeps.stopping.simulation import SimulatedSweep, SweepShape, simulate
from tests.slices import sliced
from tests.time_limits import scaled


def _rule(scheduler: str, **parameters: Any) -> StoppingRule:
    section = early_stopping_section(RULES)(scheduler=scheduler, **parameters)
    rule: StoppingRule = section.rule
    return rule


def _simulated(scheduler: str, epochs: int = 9, trials: int = 27, **more: Any) -> SimulatedSweep:
    options = {key: more.pop(key) for key in ("at_once", "patience") if key in more}
    rule = _rule(scheduler, **more)
    return simulate(rule, SweepShape(epochs=epochs, trials=trials, **({"at_once": 1} | options)))


@pytest.mark.parametrize("scheduler", ["none", "pbt", "pb2"])
def test_rule_that_stops_nothing_trains_all_epochs(scheduler: str) -> None:
    found = _simulated(scheduler, epochs=8, trials=5)
    assert (found.epochs, found.complete, found.repeats) == (40, 5, 0)


def test_promotions_are_one_in_reduction_at_each_rung() -> None:
    found = _simulated("asha_promote", reduction=3)
    assert found.epochs == found.most_epochs == 27 * 1 + 9 * 2 + 3 * 6
    assert found.complete == 3


def test_late_first_rung_stops_nothing() -> None:
    assert _simulated("asha", grace_epochs=9, epochs=10, trials=7).epochs == 70


def test_first_trials_at_a_rung_of_asha_go_on() -> None:
    """ASHA has nothing to compare them with, so it trains more than its promoting variant."""
    many = _simulated("asha", trials=270).epochs / 10
    few = _simulated("asha", trials=27).epochs
    assert 27 * 1 + 9 * 2 + 3 * 6 < many < few < 9 * 27


def test_hyperband_trains_more_than_asha() -> None:
    asha, hyperband = (_simulated(one, trials=200) for one in ("asha", "hyperband"))
    assert asha.epochs < hyperband.epochs < 9 * 200


def test_median_rule_stops_some() -> None:
    found = _simulated("median", epochs=20)
    assert 20 * 27 / 4 < found.epochs < 20 * 27
    assert found.least_epochs < found.epochs < found.most_epochs


@pytest.mark.parametrize("scheduler", ["none", "asha_promote", "median"])
def test_patience_ends_trials_earlier(scheduler: str) -> None:
    without = _simulated(scheduler, epochs=60)
    found = _simulated(scheduler, epochs=60, patience=3)
    assert found.epochs < without.epochs


def test_sweep_lasts_as_long_as_its_workers_need() -> None:
    alone = _simulated("none", trials=40)
    assert alone.length == pytest.approx(360, rel=0.05)
    assert _simulated("none", trials=40, at_once=4).length == pytest.approx(90, rel=0.1)
    assert _simulated("none", trials=40, at_once=100).length == pytest.approx(9, rel=0.1)
    assert alone.starts == 40
    assert _simulated("asha_promote", trials=40).starts > 40


def test_large_sweep_is_scaled_up() -> None:
    found = _simulated("none", trials=5000, at_once=8)
    assert found.trials < 5000
    assert found.epochs == 9 * 5000
    assert found.length == pytest.approx(9 * 5000 / 8, rel=0.05)


def test_simulation_is_deterministic() -> None:
    assert _simulated("hyperband", trials=40) == _simulated("hyperband", trials=40)


@pytest.mark.parametrize("scheduler", sorted(RULES))
@pytest.mark.parametrize("patience", sliced([None, 5, 500], lambda patience: patience == 5))
def test_simulation_takes_about_a_second_at_most(scheduler: str, patience: int | None) -> None:
    began = time.process_time()
    found = _simulated(scheduler, epochs=2000, trials=3000, at_once=64, patience=patience)
    assert time.process_time() - began < scaled(2.0)
    assert 0 < found.epochs <= 2000 * 3000
