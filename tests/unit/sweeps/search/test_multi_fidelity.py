"""What a sampler sees of trials with different training lengths."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.reader import LedgerReader
from sweeps.search.dry_run import dry_run
from sweeps.search.shown_trials import OneRung
from sweeps.search.suggest import Suggester
from sweeps.spec.sections import EarlyStoppingConfig
from sweeps.spec.spec import parse_spec
from tests.slices import sliced

COMPLETE, PRUNED, FAIL, RUNNING = (
    TrialState.COMPLETE,
    TrialState.PRUNED,
    TrialState.FAIL,
    TrialState.RUNNING,
)
RUNGS = (1, 3, 9)


def _trial(state: TrialState, *reports: float) -> FrozenTrial:
    """A trial that reported after each of its epochs."""
    value = min(reports) if state == COMPLETE else None
    told = dict(enumerate(reports, start=1))
    return create_trial(state=state, value=value, intermediate_values=told)


def _shown(trials: list[FrozenTrial], enough: int, *, minimize: bool = True) -> list[Any]:
    """Of each trial, what it counts as complete with, or else its state."""
    shown = OneRung(RUNGS, minimize=minimize).show(trials, startup=enough, enough=enough)
    return [one.value if one.state == COMPLETE else one.state for one in shown]


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [("none", ()), ("asha", RUNGS), ("asha_promote", RUNGS), ("hyperband", RUNGS)],
)
def test_trials_compare_at_rungs_and_at_the_end(scheduler: Any, expected: tuple[int, ...]) -> None:
    config = EarlyStoppingConfig(scheduler=scheduler, grace_epochs=1, reduction=3)
    assert config.rule.comparable_epochs(9) == expected


def test_trials_compare_at_the_highest_common_rung() -> None:
    trials = [
        _trial(COMPLETE, 0.9, 0.8, 0.85, *[0.1] * 6),
        _trial(PRUNED, 0.5, 0.6, 0.7),
        _trial(PRUNED, 0.3),
        _trial(FAIL, 0.2, 0.2, 0.2),
        _trial(RUNNING, 0.4, 0.35, 0.36, 0.05),
        _trial(RUNNING, 0.1),
    ]
    assert _shown(trials, 3) == [0.8, 0.5, PRUNED, FAIL, 0.35, RUNNING]
    assert _shown(trials, 2) == _shown(trials, 3), "one alone has come to the end"
    assert _shown(trials, 1) == [0.1, PRUNED, PRUNED, FAIL, RUNNING, RUNNING]
    assert _shown(trials, 3, minimize=False) == [0.9, 0.7, PRUNED, FAIL, 0.4, RUNNING]
    assert [one.state for one in trials] == [COMPLETE, PRUNED, PRUNED, FAIL, RUNNING, RUNNING]


def test_few_ended_trials_keep_their_values() -> None:
    running = [_trial(RUNNING, 0.4, 0.3, 0.2), _trial(RUNNING, 0.5, 0.4, 0.3)]
    trials = [*running, _trial(PRUNED, 0.6), _trial(FAIL)]
    assert _shown(trials, 2) == [RUNNING, RUNNING, PRUNED, FAIL]
    assert _shown([*trials, _trial(PRUNED, 0.7)], 2) == [0.2, 0.3, PRUNED, FAIL, PRUNED]


def test_a_higher_rung_needs_fewer_than_the_startup() -> None:
    """Who is ahead after one epoch need not be it after three."""
    ended = [_trial(PRUNED, 0.1), _trial(PRUNED, 0.2), _trial(PRUNED, 0.5, 0.4, 0.3)]
    trials = [*ended, _trial(PRUNED, 0.6, 0.3, 0.2)]
    shown = OneRung(RUNGS, minimize=True).show(trials, startup=4, enough=2)
    assert [one.value for one in shown] == [None, None, 0.3, 0.2]
    shown = OneRung(RUNGS, minimize=True).show(trials, startup=5, enough=2)
    assert [one.state for one in shown] == [PRUNED] * 4, "four trials are no startup of five"


@pytest.mark.parametrize(("sampler", "best"), [("tpe", 0.2), ("gp", 0.8)])
def test_rung_needs_as_many_trials_as_the_model(tmp_path: Path, sampler: str, best: float) -> None:
    """Four come to the third epoch, and show there that the others only began well: TPE takes so
    few; GP would draw by chance before it has its eight.
    """
    spec = parse_spec(SPEC.replace("search: {", f"search: {{sampler: {sampler}, "), "s.yaml")
    ledger = Ledger.create(tmp_path / "l.db", mode="min", sweep_id="s")
    space = {key: one.to_optuna() for key, one in spec.space.items()}
    for number in range(24):
        trained_past_report = number in (0, 6, 12, 18)
        x = 0.2 + number / 1000 if trained_past_report else 0.8 + number / 1000
        ledger.add(Suggestion({"task.x": x}, space))
        ledger.report(number, epoch=1, step=1, value=0.5 if trained_past_report else 0.4)
        if trained_past_report:
            ledger.report(number, epoch=3, step=3, value=0.1 + abs(x - 0.2))
        ledger.finish(number, "pruned")
    proposer = Suggester(spec, ledger)
    numbers = [n for n in range(24, 44) if sampler == "tpe" or n % 2 == 0]  # others are TPE's
    drawn = [proposer.propose(number).params["task.x"] for number in numbers]
    assert sum(abs(x - best) < 0.2 for x in drawn) > 0.75 * len(drawn), drawn


def test_trial_that_finished_counts_at_every_rung() -> None:
    early = _trial(COMPLETE, 0.5, 0.4)
    assert _shown([early, _trial(COMPLETE, *[0.3] * 9)], 2) == [0.4, 0.3]


def test_trial_without_a_finite_value_has_failed_and_makes_no_rung() -> None:
    trials = [_trial(PRUNED, math.nan), _trial(PRUNED, 0.5)]
    assert _shown(trials, 2) == [PRUNED, PRUNED]
    assert _shown(trials, 1) == [FAIL, 0.5]


SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 60
budget: {epochs: 9}
space: {task.x: {uniform: [0, 1]}}
search: {startup_trials: 8}
early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 3}
"""


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_sampler_imitates_better_trials_not_earlier_ones(tmp_path: Path, sampler: str) -> None:
    """ASHA lets the first trials go on, whatever they are; those after them are compared."""
    spec = parse_spec(SPEC.replace("search: {", f"search: {{sampler: {sampler}, "), "s.yaml")
    ledger = Ledger.create(tmp_path / "l.db", mode="min", sweep_id="s")
    space = {key: one.to_optuna() for key, one in spec.space.items()}
    for number in range(30):
        early = number < 3
        x = 0.8 if early else number / 30 if number % 3 else 0.2 + number / 1000
        ledger.add(Suggestion({"task.x": x}, space))
        value = (x - 0.2) ** 2
        for epoch in range(1, 10 if early else 2):
            ledger.report(number, epoch=epoch, step=epoch, value=value / epoch**0.1)
        ledger.finish(number, "complete" if early else "pruned")
    proposer = Suggester(spec, ledger)
    drawn = [proposer.propose(number).params["task.x"] for number in range(30, 50)]
    assert sum(abs(x - 0.2) < 0.2 for x in drawn) >= 15, drawn


@pytest.mark.parametrize(
    "sampler", sliced(["tpe", "gp", "nsgaii", "random"], ("tpe", "gp").__contains__)
)
def test_pruned_trials_of_several_metrics_are_learned_from(tmp_path: Path, sampler: str) -> None:
    """Where TPE and GP compare trials at a rung, they draw where both metrics are good."""
    text = SPEC.replace("search: {", f"search: {{sampler: {sampler}, ")
    text = text.replace("val/loss", "[val/loss, val/accuracy]").replace(
        "mode: min", "mode: [min, max]"
    )
    spec = parse_spec(text, "s.yaml")
    dry_run(spec)
    ledger = Ledger.create(tmp_path / "l.db", mode=spec.modes, sweep_id="s")
    space = {key: one.to_optuna() for key, one in spec.space.items()}
    for number in range(30):
        early = number < 3
        x = 0.8 if early else number / 30 if number % 3 else 0.2 + number / 1000
        ledger.add(Suggestion({"task.x": x}, space))
        for epoch in range(1, 10 if early else 2):
            value = (x - 0.2) ** 2 / epoch**0.1
            ledger.report(number, epoch=epoch, step=epoch, value=value, others=[1 - value])
        ledger.finish(number, "complete" if early else "failed" if number == 29 else "pruned")
    proposer = Suggester(spec, ledger)
    drawn = [proposer.propose(number).params["task.x"] for number in range(30, 45)]
    if sampler in ("tpe", "gp"):
        assert sum(abs(x - 0.2) < 0.2 for x in drawn) > 10, drawn
    records = LedgerReader(tmp_path / "l.db").records()
    assert [one.compared_reports for one in records] == [
        one.compared_reports for one in ledger.trials()
    ]
    assert records[3].compared_reports.keys() == {1}
    assert len(records[3].all_reports[1]) == 2
