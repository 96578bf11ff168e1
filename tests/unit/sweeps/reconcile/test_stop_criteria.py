"""Sweep-level stop criteria: when they fire, from the ledger alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.reasons import BY_THE_SWEEP, BY_THE_USER
from sweeps.ledger.trials import TrialSummary
from sweeps.reconcile.stop_criteria import StopCriterionMet, StopMonitor, active_stop_criterion
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.specs import make_spec
from tests.unit.sweeps.sweep_factory import MadeSweep

START = datetime(2026, 11, 21)


def _spec(stop: str, mode: str = "min") -> SweepSpec:
    return make_spec(f"stop: {stop}\n", mode=mode, trials=20)


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


@pytest.mark.parametrize(
    ("mode", "told", "expected"),
    [
        ("min", [("complete", 0.06)], None),
        ("min", [("complete", 0.05)], "stop.value"),
        ("min", [("failed", 0.01), ("running", 0.01)], None),
        ("min", [("pruned", 0.01)], "stop.value"),
        ("max", [("complete", 0.04)], None),
        ("max", [("complete", 0.06)], "stop.value"),
        ("min", [], None),
    ],
)
def test_a_target_is_reached_by_the_best_trial(
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
        ([("complete", 1.0)] + [("pruned", 1.1)] * 3, "stop.plateau"),
        ([("complete", 1.0), ("pruned", 0.1), ("pruned", 1.1), ("pruned", 1.1)], None),
        ([("complete", 1.0), ("pruned", 0.1), ("pruned", 0.1), ("failed", None)], None),
        ([("complete", 1.0), ("pruned", 0.1), ("pruned", 0.1), ("running", 2.0)], None),
        ([("pruned", 1.0)] * 9, "stop.plateau"),
        ([("failed", None)] * 9, None),  # there is no best value that could be improved
    ],
)
def test_plateau_is_n_trials_without_improvement(
    told: list[tuple[str, float]], expected: str | None
) -> None:
    assert _key(_spec(PLATEAU), _trials(*told)) == expected
    upwards = [(state, value and -value) for state, value in told]
    assert _key(_spec(PLATEAU, "max"), _trials(*upwards)) == expected


def test_plateau_counts_trials_in_order_of_their_end() -> None:
    trials = _trials(("complete", 0.5), *[("complete", 1.0)] * 4)
    assert _key(_spec(PLATEAU), trials) == "stop.plateau"
    late = [replace(trials[0], finish_order=5), *trials[1:]]
    assert _key(_spec(PLATEAU), late) is None


def test_plateau_order_survives_a_clock_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "ledger.db"
    ledger = Ledger.create(place, mode="min", sweep_id="s")
    for hour, value in ((12, 1.0), (13, 0.9), (14, 0.8), (11, 0.5)):
        now = int((START + timedelta(hours=hour)).timestamp() * 1e9)
        monkeypatch.setattr("sweeps.ledger.ledger.time.time_ns", lambda now=now: now)
        number = ledger.add(Suggestion({}, {}, {})).number
        ledger.report(number, epoch=1, step=1, value=value)
        ledger = Ledger.open(place)  # by the next driver
        ledger.finish(number, "complete")
    for trials in (ledger.trials(), LedgerReader(place).trials):
        ends = [trial.ended_at for trial in trials if trial.ended_at is not None]
        assert ends.index(min(ends)) == 3
        assert _key(_spec(PLATEAU), trials) is None


def test_trials_stopped_by_the_user_do_not_count() -> None:
    told = [("complete", 1.0)] + [("pruned", 2.0)] * 3
    assert _key(_spec(PLATEAU), _trials(*told)) == "stop.plateau"
    for reason in (BY_THE_USER, BY_THE_SWEEP + "why"):
        assert _key(_spec(PLATEAU), _trials(*told, reason=reason)) is None
    early = _trials(*told, reason="asha at epoch 1: val/loss 2, needed at most 1, rank 3 of 3")
    assert _key(_spec(PLATEAU), early) == "stop.plateau"


def test_time_is_that_of_all_attempts() -> None:
    assert _key(_spec("{hours: 0.5}"), [], seconds=1799.0) is None
    found = active_stop_criterion(_spec("{hours: 0.5}"), [], seconds=1800.0)
    assert found == StopCriterionMet("stop.hours", "its 0.5 hours are over", ("stop.hours=1",))


@pytest.mark.parametrize(
    ("hours", "seconds", "go_on"),
    [(1, 5 * 3600, 10), (1, 18_185, 10.1), (0.01, 36.02, 0.02), (600, 2_160_007, 1200)],
)
def test_expired_time_limit_is_doubled_in_the_remedy(
    hours: float, seconds: float, go_on: float
) -> None:
    found = active_stop_criterion(_spec(f"{{hours: {hours}}}"), [], seconds)
    assert found is not None
    assert found.continue_overrides == (f"stop.hours={go_on}",)


def test_complete_sweep_was_not_stopped() -> None:
    spec = _spec("{hours: 1}").model_copy(update={"trials": 2})
    ended = _trials(("complete", 1.0), ("pruned", 2.0))
    assert _key(spec, ended, seconds=1e6) is None
    cut = _trials(("complete", 1.0), ("pruned", 2.0), reason=BY_THE_SWEEP + "its time is over")
    assert _key(spec, cut, seconds=1e6) == "stop.hours"


def test_each_criterion_names_how_to_continue() -> None:
    trials = _trials(*[("complete", 1.0)] * 5)
    for stop in ("{value: 2}", "{plateau: {trials: 2}}", "{hours: 1}"):
        spec = _spec(stop)
        found = active_stop_criterion(spec, trials, 3600.0)
        assert found is not None
        change = parse_spec(spec.to_yaml(), "s.yaml", found.continue_overrides)
        assert active_stop_criterion(change, trials, 3600.0) is None


@pytest.mark.parametrize(("points", "go_on"), [(2, ()), (3, ("stop.hours=2", "trials=3"))])
def test_stop_at_the_end_of_a_grid_names_its_size(points: int, go_on: tuple[str, ...]) -> None:
    space = f"{{train.optimizer.lr: {{choice: {[0.1, 0.2, 0.3][:points]}}}}}"
    spec = make_spec(trials=2, stop="{hours: 1}", space=space, search="{sampler: grid}")
    cut = _trials(("complete", 1.0), ("pruned", 2.0), reason=BY_THE_SWEEP + "its time is over")
    found = active_stop_criterion(spec, cut, 3600.0)
    assert found is not None
    assert found.continue_overrides == go_on
    if go_on:
        parse_spec(spec.to_yaml(), "s.yaml", go_on)


def test_driver_time_adds_to_earlier_attempts(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l.db", mode="min", sweep_id="s")
    now = [100.0]
    spec = _spec("{hours: 0.01}")  # 36 s
    first = StopMonitor(
        spec, ledger, ends=lambda: 0, flush=lambda: None, fence=lambda: None, clock=lambda: now[0]
    )
    now[0] += 9.0
    assert first.look() is None
    assert ledger.seconds == 0.0, "not written in every turn"
    now[0] += 11.0
    assert first.look() is None
    assert LedgerReader(tmp_path / "l.db").seconds == ledger.seconds == 20.0
    now[0] += 5.0  # lost with a driver that is killed
    second = StopMonitor(
        spec, ledger, ends=lambda: 0, flush=lambda: None, fence=lambda: None, clock=lambda: now[0]
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


def test_criterion_is_checked_at_the_end_of_a_trial(tmp_path: Path) -> None:
    """Also while that end is still being written."""
    sweep = MadeSweep(tmp_path, more="stop: {value: 0.5}")
    ends: list[int] = []
    stops = StopMonitor(
        sweep.spec,
        sweep.ledger,
        ends=lambda: len(ends),
        flush=lambda: [sweep.add("complete", 0.5) for _ in ends],
        fence=lambda: None,
    )
    assert stops.look() is None
    ends.append(0)
    found = stops.look()
    assert found is not None
    assert found.key == "stop.value"


def test_stopped_sweep_is_finished_until_its_spec_changes(tmp_path: Path) -> None:
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
