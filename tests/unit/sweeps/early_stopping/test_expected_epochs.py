"""How many epochs a stopping rule leaves of a sweep, as estimated before it starts."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from sweeps.config.sections import early_stopping_section
from sweeps.early_stopping.registry import RULES
from sweeps.early_stopping.rule import StoppingRule


def _rule(scheduler: str, **parameters: Any) -> StoppingRule:
    section = early_stopping_section(RULES)(scheduler=scheduler, **parameters)
    rule: StoppingRule = section.rule
    return rule


@pytest.mark.parametrize("scheduler", ["asha", "asha_promote"])
def test_one_in_reduction_passes_each_rung(scheduler: str) -> None:
    rule = _rule(scheduler, reduction=3)
    assert rule.rungs(9) == (1, 3)
    assert rule.expected_epochs(9, 27) == 27 * 1 + 9 * 2 + 3 * 6


def test_one_trial_at_least_trains_to_the_end() -> None:
    assert _rule("asha", reduction=4).expected_epochs(10, 2) == 2 + 1 * 3 + 1 * 6


def test_late_first_rung_stops_nothing() -> None:
    assert _rule("asha", grace_epochs=9).expected_epochs(10, 7) == 70


def test_brackets_of_hyperband_are_counted_apart() -> None:
    rule = _rule("hyperband", reduction=3)
    asha = _rule("asha", reduction=3).expected_epochs(9, 30)
    found = rule.expected_epochs(9, 30)
    assert asha is not None
    assert found is not None
    assert asha < found < 9 * 30
    never_stopped = sum(rule.first_rung(number, 9) == 2 for number in range(30))
    assert never_stopped > 0
    assert found > 9 * never_stopped


@pytest.mark.parametrize("scheduler", ["none", "pbt", "pb2"])
def test_rule_that_stops_nothing_takes_all_epochs(scheduler: str) -> None:
    assert _rule(scheduler).expected_epochs(8, 5) == 40


def test_median_rule_gives_no_estimate() -> None:
    assert _rule("median").expected_epochs(8, 5) is None


@pytest.mark.parametrize("scheduler", ["asha", "hyperband"])
def test_estimate_is_near_what_random_curves_take(scheduler: str) -> None:
    """Trials whose curves never cross, in a random order, as a random sampler draws them."""
    rule, trials, epochs = _rule(scheduler, reduction=3), 200, 27
    stopper = rule.make_stopper(epochs=epochs, minimize=True)
    assert stopper is not None
    trained = 0
    for number, value in enumerate(numpy.random.default_rng(0).permutation(trials)):
        for epoch in range(1, epochs + 1):
            trained += 1
            if stopper.stops(number, epoch, float(value)) is not None:
                break
    expected = rule.expected_epochs(epochs, trials)
    assert trained == pytest.approx(expected, rel=0.25)
