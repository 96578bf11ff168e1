"""Stops of a whole sweep: what fires, from the ledger alone, and what looks at it afterwards."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sweeps.config.spec import SweepSpec, parse_spec
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.reader import LedgerReader, TrialRecord, TrialSummary
from sweeps.ledger.suggestion import Suggestion
from sweeps.optuna_compat import writes
from sweeps.policies.stop_criteria import (
    StopCriterionMet,
    StopMonitor,
    active_stop_criterion,
)
from sweeps.reconciliation.reconcile import (
    MissingParams,
    MissingRun,
    StaleWriter,
    SweepState,
    TrialState,
    UnrecordedEnd,
    reconcile,
)
from sweeps.recording.tags import BY_THE_SWEEP, BY_THE_USER, end_tags
from sweeps.results.sweep_status import SweepStatus
from tests.unit.sweeps.sweep_factory import MadeSweep

SPEC = """
name: s
task: digits
metric: val/loss
mode: {mode}
trials: 20
stop: {stop}
"""
OPEN = TrialRecord(
    number=0, state="running", params={"train.optimizer.lr": 0.01}, reports={1: 0.5}, value=0.5
)
START = datetime(2026, 11, 21)


def _spec(stop: str, mode: str = "min") -> SweepSpec:
    return parse_spec(SPEC.format(stop=stop, mode=mode), "s.yaml")


def _trials(*told: tuple[str, float | None], reason: str | None = None) -> list[TrialSummary]:
    return [
        TrialSummary(
            number=number,
            state=state,
            params={},
            value=value,
            ended_at=None if state == "running" else START + timedelta(seconds=number),
            reason=reason if state == "pruned" else None,
        )
        for number, (state, value) in enumerate(told)
    ]


def _key(spec: SweepSpec, trials: list[TrialSummary], seconds: float = 0.0) -> str | None:
    found = active_stop_criterion(spec, trials, seconds)
    return found and found.key


def test_without_a_stop_nothing_ends_a_sweep() -> None:
    assert _key(_spec("{}"), _trials(("complete", 0.0)), seconds=1e9) is None


@pytest.mark.parametrize(
    ("mode", "told", "expected"),
    [
        ("min", [("complete", 0.06)], None),
        ("min", [("complete", 0.05)], "stop.value"),
        ("min", [("pruned", 0.01), ("failed", 0.01), ("running", 0.01)], None),
        ("max", [("complete", 0.04)], None),
        ("max", [("complete", 0.06)], "stop.value"),
        ("min", [], None),
    ],
)
def test_a_target_is_reached_by_a_complete_trial(
    mode: str, told: list[tuple[str, float]], expected: str | None
) -> None:
    assert _key(_spec("{value: 0.05}", mode), _trials(*told)) == expected


PLATEAU = "{plateau: {trials: 3, min_delta: 0.1}}"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([("complete", 1.0)] + [("complete", 0.95)] * 3, "stop.plateau"),
        ([("complete", 1.0)] + [("complete", 0.95)] * 2, None),
        ([("complete", 1.0), ("complete", 2.0), ("complete", 0.8), ("complete", 2.0)], None),
        ([("complete", 1.0), ("pruned", 0.1), ("pruned", 0.1), ("pruned", 0.1)], "stop.plateau"),
        ([("complete", 1.0), ("pruned", 0.1), ("pruned", 0.1), ("failed", None)], None),
        ([("complete", 1.0), ("pruned", 0.1), ("pruned", 0.1), ("running", 2.0)], None),
        ([("pruned", 1.0)] * 9, None),  # there is no best value that could be improved
    ],
)
def test_a_plateau_is_so_many_trials_without_an_improvement(
    told: list[tuple[str, float]], expected: str | None
) -> None:
    assert _key(_spec(PLATEAU), _trials(*told)) == expected
    upwards = [(state, value and -value) for state, value in told]
    assert _key(_spec(PLATEAU, "max"), _trials(*upwards)) == expected


def test_a_plateau_counts_trials_in_the_order_in_which_they_ended() -> None:
    trials = _trials(("complete", 0.5), *[("complete", 1.0)] * 4)
    assert _key(_spec(PLATEAU), trials) == "stop.plateau"
    late = [replace(trials[0], ended_at=START + timedelta(hours=1)), *trials[1:]]
    assert _key(_spec(PLATEAU), late) is None


def test_a_plateau_counts_trials_as_they_ended_although_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "ledger.db"
    ledger = Ledger.create(place, mode="min", sweep_id="s")
    for hour, value in ((12, 1.0), (13, 0.9), (14, 0.8), (11, 0.5)):
        now = START + timedelta(hours=hour)
        clock = type("Clock", (datetime,), {"now": staticmethod(lambda now=now: now)})
        monkeypatch.setattr(writes, "datetime", clock)
        number = ledger.add(Suggestion({}, {}, {})).number
        ledger.report(number, epoch=1, step=1, value=value)
        ledger = Ledger.open(place)  # by the next driver
        ledger.finish(number, "complete")
    for trials in (ledger.trials(), LedgerReader(place).trials):
        ends = [trial.ended_at for trial in trials if trial.ended_at is not None]
        assert ends.index(min(ends)) == 3
        assert _key(_spec(PLATEAU), trials) is None


def test_who_was_stopped_by_hand_or_with_the_sweep_was_not_tried() -> None:
    told = [("complete", 1.0)] + [("pruned", 2.0)] * 3
    assert _key(_spec(PLATEAU), _trials(*told)) == "stop.plateau"
    for reason in (BY_THE_USER, BY_THE_SWEEP + "why"):
        assert _key(_spec(PLATEAU), _trials(*told, reason=reason)) is None


def test_time_is_that_of_all_attempts() -> None:
    assert _key(_spec("{hours: 0.5}"), [], seconds=1799.0) is None
    found = active_stop_criterion(_spec("{hours: 0.5}"), [], seconds=1800.0)
    assert found == StopCriterionMet("stop.hours", "its 0.5 hours are over", ("stop.hours=1",))


@pytest.mark.parametrize(
    ("hours", "seconds", "go_on"),
    [(1, 5 * 3600, 10), (1, 18_185, 10.1), (0.01, 36.02, 0.02), (600, 2_160_007, 1200)],
)
def test_a_sweep_whose_time_is_long_over_is_given_twice_of_what_it_took(
    hours: float, seconds: float, go_on: float
) -> None:
    found = active_stop_criterion(_spec(f"{{hours: {hours}}}"), [], seconds)
    assert found is not None
    assert found.continue_overrides == (f"stop.hours={go_on}",)


def test_a_sweep_that_had_come_to_its_end_was_not_stopped() -> None:
    spec = _spec("{hours: 1}").model_copy(update={"trials": 2})
    ended = _trials(("complete", 1.0), ("pruned", 2.0))
    assert _key(spec, ended, seconds=1e6) is None
    cut = _trials(("complete", 1.0), ("pruned", 2.0), reason=BY_THE_SWEEP + "its time is over")
    assert _key(spec, cut, seconds=1e6) == "stop.hours"


def test_each_stop_says_with_what_the_sweep_goes_on() -> None:
    trials = _trials(*[("complete", 1.0)] * 5)
    for stop in ("{value: 2}", "{plateau: {trials: 2}}", "{hours: 1}"):
        spec = _spec(stop)
        found = active_stop_criterion(spec, trials, 3600.0)
        assert found is not None
        change = parse_spec(spec.to_yaml(), "s.yaml", found.continue_overrides)
        assert active_stop_criterion(change, trials, 3600.0) is None


def test_a_stop_that_met_the_last_trials_says_that_the_sweep_needs_more() -> None:
    spec = _spec("{hours: 1}").model_copy(update={"trials": 2})
    cut = _trials(("complete", 1.0), ("pruned", 2.0), reason=BY_THE_SWEEP + "its time is over")
    found = active_stop_criterion(spec, cut, 3600.0)
    assert found is not None
    assert found.continue_overrides == ("stop.hours=2", "trials=4")


@pytest.mark.parametrize(("points", "go_on"), [(2, ()), (3, ("stop.hours=2", "trials=3"))])
def test_a_stop_that_met_the_last_trials_of_a_grid_names_no_more_than_it_has(
    points: int, go_on: tuple[str, ...]
) -> None:
    text = SPEC.format(stop="{hours: 1}", mode="min").replace("trials: 20", "trials: 2")
    rates = [0.1, 0.2, 0.3][:points]
    text += f"space: {{train.optimizer.lr: {{choice: {rates}}}}}\nsearch: {{sampler: grid}}\n"
    spec = parse_spec(text, "s.yaml")
    cut = _trials(("complete", 1.0), ("pruned", 2.0), reason=BY_THE_SWEEP + "its time is over")
    found = active_stop_criterion(spec, cut, 3600.0)
    assert found is not None
    assert found.continue_overrides == go_on
    if go_on:
        parse_spec(spec.to_yaml(), "s.yaml", go_on)


def test_a_drivers_time_is_kept_and_added_to_that_of_the_one_before(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l.db", mode="min", sweep_id="s")
    now = [100.0]
    spec = _spec("{hours: 0.01}")  # 36 s
    first = StopMonitor(
        spec, ledger, ends=lambda: 0, settle=lambda: None, fence=lambda: None, clock=lambda: now[0]
    )
    now[0] += 9.0
    assert first.look() is None
    assert ledger.seconds == 0.0, "not written in every turn"
    now[0] += 11.0
    assert first.look() is None
    assert LedgerReader(tmp_path / "l.db").seconds == ledger.seconds == 20.0
    now[0] += 5.0  # lost with a driver that is killed
    second = StopMonitor(
        spec, ledger, ends=lambda: 0, settle=lambda: None, fence=lambda: None, clock=lambda: now[0]
    )
    now[0] += 15.5
    assert second.look() is None
    now[0] += 0.5
    found = second.look()
    assert found is not None
    assert found.key == "stop.hours"
    assert ledger.seconds == 36.0, "a kill does not make it forgotten"
    now[0] += 5.0
    assert second.look() is not None
    assert ledger.seconds == 36.0, "written once"
    second.keep()
    assert ledger.seconds == 41.0


def test_a_stop_is_noticed_at_the_end_of_a_trial(tmp_path: Path) -> None:
    """Also while that end is still being written."""
    sweep = MadeSweep(tmp_path, more="stop: {value: 0.5}")
    ends: list[int] = []
    stops = StopMonitor(
        sweep.spec,
        sweep.ledger,
        ends=lambda: len(ends),
        settle=lambda: [sweep.add("complete", 0.5) for _ in ends],
        fence=lambda: None,
    )
    assert stops.look() is None
    ends.append(0)
    found = stops.look()
    assert found is not None
    assert found.key == "stop.value"


def test_without_a_stop_no_trial_is_read_however_many_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would read all of them at each one's end."""
    sweep = MadeSweep(tmp_path)
    settled: list[None] = []
    stops = StopMonitor(
        sweep.spec,
        sweep.ledger,
        ends=lambda: 1,
        settle=lambda: settled.append(None),
        fence=lambda: None,
    )
    sweep.add("complete", 0.5)
    monkeypatch.delattr(Ledger, "trials")
    assert stops.look() is None
    assert settled == []


def test_a_stopped_sweep_is_finished_until_its_spec_lets_it_go_on(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more="stop: {value: 0.5}")
    sweep.add("complete", 0.5)
    status = sweep.view.status()
    assert status["state"] == "finished"
    assert status["trials"]["waiting"] == 0
    assert status["stopped_by"]["key"] == "stop.value"
    outcome = sweep.view.outcome()
    assert (outcome.exit_code, outcome.stop) == (0, sweep.view.stop)
    sweep.add(None, 0.7)
    assert sweep.view.state == "interrupted", "somebody has still to be told"


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        (TrialState(OPEN), [MissingRun(0), UnrecordedEnd(0, "pruned", "why")]),
        (
            TrialState(OPEN, stale_writer=True),
            [MissingRun(0), StaleWriter(0), UnrecordedEnd(0, "pruned", "why")],
        ),
        (TrialState(OPEN, trained=True), [MissingRun(0), UnrecordedEnd(0, "complete")]),
        (TrialState(OPEN, stopped=True), [MissingRun(0), UnrecordedEnd(0, "pruned")]),
        (
            TrialState(replace(OPEN, params={}, reports={})),  # killed while they were stored
            [MissingParams(0), MissingRun(0), UnrecordedEnd(0, "pruned", "why")],
        ),
    ],
)
def test_who_is_unfinished_when_the_sweep_is_over_has_its_end(
    trial: TrialState, expected: list[Any]
) -> None:
    facts = SweepState((trial,), parameters=frozenset(OPEN.params), num_awaited=4, stop="why")
    assert reconcile(facts) == expected


@pytest.mark.parametrize(
    ("reason", "stopped_by"),
    [(None, "asha_promote"), (BY_THE_USER, "user"), (BY_THE_SWEEP + "time", "sweep")],
)
def test_a_pruned_trials_run_says_by_whom(reason: str | None, stopped_by: str) -> None:
    early = "{}\nearly_stopping: {scheduler: asha_promote}"
    record = replace(OPEN, state="pruned", reason=reason)
    assert end_tags(record, _spec(early))["stopped_by"] == stopped_by


def test_looking_at_a_stopped_sweep_reads_the_same_time(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more="stop: {hours: 1}")
    sweep.add("complete", 0.5)
    assert SweepStatus(sweep.paths).state == "interrupted"
    sweep.ledger.note_seconds(3600.0)
    assert SweepStatus(sweep.paths).state == "finished"
