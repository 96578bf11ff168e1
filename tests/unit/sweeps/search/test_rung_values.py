"""Samplers and priors are told the value that every view shows, or that it is not finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from sweeps.ledger.attributes import EXEMPT
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.over_seeds import repeats_of
from sweeps.ledger.reasons import BY_THE_USER
from sweeps.search.prior_trials import Comparison
from sweeps.search.shown_trials import ShownTrials
from sweeps.spec.spec import SweepSpec, parse_spec

SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 60
budget: {epochs: 9}
space: {task.x: {uniform: [0, 1]}, task.y: {uniform: [0, 1]}}
search: {startup_trials: 5}
"""
RULES = ("none", "asha", "asha_promote", "hyperband", "median")
PATIENCE, RULE = "patience at epoch 4: not better", "asha at epoch 3: needed at most 0.5"
Ending = tuple[Any, str | None]
FULL: Ending = ("complete", None)
STOPPED: Ending = ("pruned", RULE)


def _spec(scheduler: str, *overrides: str) -> SweepSpec:
    return parse_spec(SPEC, "s.yaml", (f"early_stopping.scheduler={scheduler}", *overrides))


def _ledger(path: Path, spec: SweepSpec) -> Ledger:
    return Ledger.create(
        path / "l.db",
        mode=spec.mode,
        sweep_id="s",
        select=spec.select,
        repeats=repeats_of(spec),
    )


def _add(ledger: Ledger, spec: SweepSpec, *seeds: tuple[Sequence[float], Ending | None]) -> int:
    """Add a configuration whose seeds report these values and end so; None: it still trains."""
    space = {key: one.to_optuna() for key, one in spec.space.items()}
    first = len(ledger.trials())
    params = {"task.x": (first * 0.37) % 1, "task.y": (first * 0.71) % 1}

    def add() -> None:
        for index, (values, ending) in enumerate(seeds):
            one = ledger.add_extra("repeat", first, index) if index else None
            number = (one or ledger.add(Suggestion(params, space))).number
            for epoch, value in enumerate(values, start=1):
                ledger.report(number, epoch=epoch, step=epoch, value=value)
            if ending is not None:
                ledger.finish(number, ending[0], reason=ending[1])

    ledger.transaction(add)
    return first


def _received(
    spec: SweepSpec, ledger: Ledger, sampler: BaseSampler | None = None
) -> list[FrozenTrial]:
    shown = ShownTrials(spec, ledger)
    return shown.for_sampler(sampler or TPESampler(), shown.as_points(but=len(shown.of_search())))


def _told(trials: list[FrozenTrial]) -> list[Any]:
    return [one.value if one.state == TrialState.COMPLETE else one.state.name for one in trials]


LATE = [*[0.8] * 8, 0.1]
EARLY = [0.1, *[0.9] * 8]
CURVES: dict[str, list[Any]] = {
    "bests at other epochs": [(EARLY, FULL), (LATE, FULL), ([0.9, 0.2, *[0.7] * 7], FULL)],
    "one ends by patience": [
        ([0.9] * 4, ("complete", PATIENCE)),
        ([1 - epoch / 10 for epoch in range(1, 10)], FULL),
        ([0.5, 0.6, 0.6, 0.6], ("complete", PATIENCE)),
    ],
    "one is not finite for a while": [
        ([math.nan, math.nan, *[0.4] * 7], FULL),
        ([*[0.3] * 4, math.nan, *[0.5] * 4], FULL),
        (LATE, FULL),
    ],
}


@pytest.mark.parametrize(("seeds", "how"), [(1, "mean"), (2, "mean"), (3, "median")])
@pytest.mark.parametrize("select", ["checkpoint", "final"])
def test_told_at_the_end_is_what_every_view_shows(
    tmp_path: Path, select: str, seeds: int, how: str
) -> None:
    given = (f"select={select}", f"repeats={{seeds: {seeds}, value: {how}}}")
    ledger = _ledger(tmp_path, _spec("none", *given))
    for curves in CURVES.values():
        for turn in range(3):
            mine = [curves[(turn + index) % 3] for index in range(seeds)]
            _add(ledger, _spec("none", *given), *mine)
    shown = [one.value for one in ledger.trials() if one.role == "search"]
    for scheduler in RULES:
        spec = _spec(scheduler, *given, "early_stopping.patience=3")
        for sampler in (TPESampler(), GPSampler()):
            assert _told(_received(spec, ledger, sampler)) == pytest.approx(shown), scheduler


@pytest.mark.parametrize(
    ("select", "expected"), [("checkpoint", {1: 0.5, 3: 0.4}), ("final", {1: 0.5, 3: 0.55})]
)
def test_each_seed_has_its_own_best_report_by_the_rung(
    tmp_path: Path, select: str, expected: dict[int, float]
) -> None:
    """The best reports are of other epochs: at the third, 0.3 and 0.5, and the means are above."""
    spec = _spec("asha", f"select={select}", "repeats=2")
    for rung, value in expected.items():
        (tmp_path / str(rung)).mkdir()
        ledger = _ledger(tmp_path / str(rung), spec)
        for _ in range(6):
            _add(ledger, spec, ([0.9] * rung, STOPPED))
        _add(ledger, spec, ([0.3, 0.6, 0.6, *[0.1] * 6], FULL), ([0.7, 0.5, 0.5], None))
        assert _told(_received(spec, ledger))[-1] == pytest.approx(value)


def test_configuration_counts_at_the_end_once_its_first_seed_is_complete(tmp_path: Path) -> None:
    """Its first seed ended by patience, at a rung where other trials wait."""
    spec = _spec("asha_promote", "repeats=2", "early_stopping.patience=2")
    ledger = _ledger(tmp_path, spec)
    for _ in range(6):
        _add(ledger, spec, ([0.5] * 9, FULL), ([0.5] * 9, FULL))
    _add(ledger, spec, ([0.4, 0.4, 0.4], ("complete", PATIENCE)))
    shown = ShownTrials(spec, ledger)
    assert shown.as_points(but=6 + 1)[-1].state == TrialState.RUNNING, "it does not wait"
    assert _told(_received(spec, ledger))[-1] == 0.4


@pytest.mark.parametrize(
    ("reports", "ending", "told"),
    [
        (9, FULL, "FAIL"),
        (4, FULL, 0.2),  # its own loop has ended
        (4, ("complete", PATIENCE), 0.2),
        (9, ("pruned", RULE), "PRUNED"),
        (8, ("pruned", BY_THE_USER), "FAIL"),
        (27, FULL, 0.2),
    ],
)
def test_longer_budget_compares_trials_where_all_have_come(
    tmp_path: Path, reports: int, ending: Ending, told: Any
) -> None:
    ledger = _ledger(tmp_path, _spec("none"))
    ledger.earlier_budgets = {9, 27}
    for _ in range(5):
        _add(ledger, _spec("none"), ([0.5] * 9, FULL))
    _add(ledger, _spec("none"), ([0.2] * reports, ending))
    for scheduler in RULES[1:]:
        old, spec = _spec(scheduler), _spec(scheduler, "budget.epochs=27")
        assert _told(_received(old, ledger))[:5] == [0.5] * 5
        assert _told(_received(spec, ledger))[:5] == [0.5] * 5, "the old end is a rung"
        *old_ones, own = ShownTrials(spec, ledger).of_search()
        wins = Comparison((1, 3, 9, 27), (True,), "checkpoint").wins([own], old_ones)
        assert wins == pytest.approx((5 / 6 + 0.5) / 2), "all are compared at a common rung"
    for _ in range(5):
        _add(ledger, _spec("none"), ([0.4] * 27, FULL))
    for scheduler in RULES[1:]:
        spec = _spec(scheduler, "budget.epochs=27")
        assert _told(_received(spec, ledger)) == [*["FAIL"] * 5, told, *[0.4] * 5], scheduler


def test_configuration_is_as_long_as_its_shortest_seed(tmp_path: Path) -> None:
    spec = _spec("asha", "budget.epochs=27", "repeats=2")
    ledger = _ledger(tmp_path, spec)
    ledger.earlier_budgets = {9, 27}
    for _ in range(6):
        _add(ledger, spec, ([0.5] * 9, FULL), ([*[0.5] * 9, *[0.1] * 18], FULL))
    assert _told(_received(spec, ledger)) == [0.5] * 6


NAN = math.nan
NOT_FINITE: dict[str, tuple[str, list[float], Ending | None]] = {
    "an earlier release pruned it": ("asha", [NAN], ("pruned", RULE)),
    "it failed": ("asha", [], ("failed", "non_finite: val/loss is nan")),
    "it waits": ("asha_promote", [NAN], None),
    "infinite": ("hyperband", [math.inf], ("pruned", RULE)),
    "median": ("median", [NAN, NAN], ("pruned", RULE)),
}


@pytest.mark.parametrize(
    ("scheduler", "reports", "ending"), NOT_FINITE.values(), ids=NOT_FINITE.keys()
)
def test_values_that_are_not_finite_are_a_failure_to_all(
    tmp_path: Path, scheduler: str, reports: list[float], ending: Ending | None
) -> None:
    spec = _spec(scheduler)
    ledger = _ledger(tmp_path, spec)
    for value in range(6):
        _add(ledger, spec, ([value / 10] * 9, FULL))
    _add(ledger, spec, (reports, ending))
    *_, worst = _received(spec, ledger, TPESampler())
    assert (worst.state, worst.intermediate_values) == (TrialState.PRUNED, {})
    for sampler in (GPSampler(), CmaEsSampler(), NSGAIISampler()):
        *_, worst = _received(spec, ledger, sampler)
        assert (worst.state, worst.value) == (TrialState.COMPLETE, 0.5), sampler
    *rivals, own = ShownTrials(spec, ledger).of_search()
    wins = Comparison((1, 3, 9), (True,), "checkpoint").wins([own], rivals)
    assert wins == 0.25, "of a single trial that is worse than each other one"


def test_trials_without_values_are_no_startup(tmp_path: Path) -> None:
    spec = _spec("asha")
    ledger = _ledger(tmp_path, spec)
    for _ in range(20):
        _add(ledger, spec, ([NAN], STOPPED))
    for _ in range(4):
        _add(ledger, spec, ([0.3], STOPPED))
    assert _told(_received(spec, ledger)) == [*["FAIL"] * 20, *["PRUNED"] * 4]
    _add(ledger, spec, ([0.3], STOPPED))
    assert _told(_received(spec, ledger)) == [*["PRUNED"] * 20, *[0.3] * 5]


def test_final_value_does_not_stand_for_one_at_a_rung(tmp_path: Path) -> None:
    """An exempt trial was not finite at the rung, and became the best."""
    spec = _spec("asha", "select=final")
    ledger = _ledger(tmp_path, spec)
    for _ in range(6):
        _add(ledger, spec, ([0.5] * 3, STOPPED))
    number = _add(ledger, spec, ([0.4, 0.4, NAN, *[0.1] * 6], None))
    ledger.set_attr(number, EXEMPT, True)
    ledger.finish(number, "complete")
    *_, shown = _received(spec, ledger)
    assert (shown.state, shown.intermediate_values) == (TrialState.PRUNED, {}), "the worst"


def test_what_a_sampler_receives_can_be_copied(tmp_path: Path) -> None:
    spec = _spec("asha", "repeats=2")
    ledger = _ledger(tmp_path, spec)
    _add(ledger, spec, ([0.5] * 9, FULL), ([0.5] * 9, FULL))
    received = _received(spec, ledger)
    assert copy.deepcopy(received) == received
