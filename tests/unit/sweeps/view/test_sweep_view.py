"""The status of a sweep without a driver."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from sweeps.artifacts.export import export_best
from sweeps.cli import render
from sweeps.errors import LedgerError
from sweeps.formatting import (
    format_bytes,
    format_duration,
    format_number,
)
from sweeps.ledger.attributes import SIGNALS, Abort
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.spec.revisions import write_spec
from sweeps.spec.spec import trial_yaml
from sweeps.sweep_lock import SweepLock
from sweeps.trust.findings import find, health_sentences
from sweeps.view.sweep_view import NoBest, SweepView, UnknownSweep, UnknownTrial
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox import Outbox
from trainable.store.local import LocalFiles


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    return MadeSweep(tmp_path)


@pytest.mark.parametrize(
    "stored",
    [
        {"role": "confirm"},
        {"role": "confirm", "leaders": ["first"]},
        [1],
        "confirm",
    ],
)
def test_damaged_request_for_extra_trials_is_named(sweep: MadeSweep, stored: object) -> None:
    sweep.ledger._storage.set_study_attribute("series", stored)
    with pytest.raises(LedgerError, match=r"is not a readable ledger: .*; restore it"):
        _ = sweep.view


def test_unfinished_trial_waits_without_a_driver(sweep: MadeSweep) -> None:
    sweep.add("complete", 0.5)
    sweep.add(None, 0.7)
    status = sweep.view.status()
    assert status["state"] == "interrupted"
    assert status["trials"] == {
        "waiting": 2,  # the unfinished one, and the one that was never asked for
        "running": 0,
        "complete": 1,
        "pruned": 0,
        "failed": 0,
    }


def test_unfinished_trial_runs_while_a_driver_holds_the_lock(sweep: MadeSweep) -> None:
    sweep.add(None, 0.7)
    lock = SweepLock(sweep.paths.lock)
    lock.acquire()
    status = sweep.view.status()
    lock.release()
    assert status["state"] == "running"
    assert (status["trials"]["running"], status["trials"]["waiting"]) == (1, 2)


def test_workers_are_those_of_the_trial(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more="resources: {workers: 2}")
    first, unstarted = sweep.add("complete", 0.5), sweep.add(None)
    directory = sweep.paths.trial(first)
    directory.mkdir(parents=True)
    (directory / TRIAL_CONFIG).write_text(trial_yaml(sweep.spec.trial_config(first, {})))
    write_spec(sweep.paths.spec, with_overrides(sweep.spec, ["resources.workers=3"]))
    assert sweep.view.details(first)["workers"] == 2
    assert sweep.view.details(unstarted)["workers"] == 3


def test_health_warnings_are_in_status_and_show(sweep: MadeSweep) -> None:
    for number, sentences in enumerate([["loss is 4 high"], ["loss is 5 high"], ["a", "b"], []]):
        sweep.ledger.set_attr(sweep.add(None, 0.5), SIGNALS, sentences)
        assert sweep.view.details(number)["health"] == sentences
    said = health_sentences(sweep.view.records)
    assert [("loss is 4" in one, "2 of 4" in one, "Trial 2" in one) for one in said] == [
        (True, True, False),
        (False, False, True),
        (False, False, False),  # that there is one more
    ]
    running = sweep.add(None, 0.7)  # so that nothing is found yet
    sweep.ledger.add_lost_worker(running, "it ended")
    pages = [
        render.status(sweep.view.status(), sweep.view),
        render.trial(sweep.view.details(0), sweep.spec),
        render.trial(sweep.view.details(running), sweep.spec),
    ]
    shown = io.StringIO()
    Console(file=shown, width=200).print(*pages)
    for part in ("2 of 5 trials", "health", "interrupted", "it ended"):
        assert part in shown.getvalue()
    assert [one.topic for one in find(sweep.view).sentences].count("health") == 3


def test_paused_trial_waits_until_a_worker_opens_it(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more="early_stopping: {scheduler: asha_promote, grace_epochs: 1}")
    for reports in ((0.7,), (0.6,), (0.5, 0.4)):
        sweep.add(None, *reports)
    files = LocalFiles.of(sweep.paths.trial(1))
    files.open()
    lock = SweepLock(sweep.paths.lock)
    lock.acquire()
    try:
        states = [trial["state"] for trial in sweep.view.trials()]
        assert states == ["waiting", "running", "running"], "promoted; between two rungs"
        assert sweep.view.status()["trials"]["waiting"] == 1
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("endings", "state"),
    [
        (["complete", "pruned", "failed"], "finished"),
        (["failed", "failed", "failed"], "failed"),
        (["failed", "failed", "pruned"], "finished"),
        (["complete", "complete"], "interrupted"),
    ],
)
def test_state_of_a_sweep_that_no_driver_holds(
    sweep: MadeSweep, endings: list[str], state: str
) -> None:
    for ending in endings:
        sweep.add(ending, 0.5)
    assert sweep.view.state == state


def test_best_has_the_best_value_of_complete_and_pruned_trials(sweep: MadeSweep) -> None:
    sweep.add("complete", 0.5, 0.4, 0.6)
    sweep.add("failed", 0.05)
    sweep.add(None, 0.01)
    best = sweep.view.best()
    assert (best["number"], best["value"], best["epoch"], best["step"]) == (0, 0.4, 3, 30)
    sweep.add("pruned", 0.1)
    best = sweep.view.best()
    assert (best["number"], best["state"], best["value"]) == (3, "pruned", 0.1)
    assert sweep.view.status()["best"]["number"] == 2  # the best so far, which still trains
    assert [one.number for one in sweep.ledger.front()] == [3]


def test_no_best_before_a_trial_ends_with_a_value(sweep: MadeSweep, tmp_path: Path) -> None:
    sweep.add("failed")
    with pytest.raises(NoBest, match=r"no trial of sweep 'small' has ended with a value"):
        sweep.view.best()
    with pytest.raises(NoBest):
        export_best(sweep.view, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sweep_is_concluded_once_everything_is_published(sweep: MadeSweep) -> None:
    for _ in range(3):
        sweep.add("complete", 0.5)
    assert not sweep.view.concluded
    sweep.ledger.mark_published()
    assert not sweep.view.concluded, "tracking was never told how the trials ended"
    outbox = Outbox(sweep.paths.outbox)
    for number in range(3):
        outbox.append(number, "finish", {"status": "FINISHED", "tags": {}, "time": 0})
    assert not sweep.view.concluded, "nothing is delivered"
    for number in range(3):
        batch = outbox.next_batch(number)
        assert batch is not None
        outbox.delivered(batch)
    outbox.close()
    assert sweep.view.concluded


def test_unknown_sweep_names_the_nearest(sweep: MadeSweep, tmp_path: Path) -> None:
    del sweep
    with pytest.raises(UnknownSweep) as unknown:
        SweepView(SweepPaths(tmp_path, "smal"))
    assert str(unknown.value) == (
        f"there is no sweep 'smal' below {tmp_path}; did you mean 'small'?"
    )


def test_unknown_trial_names_those_there_are(sweep: MadeSweep) -> None:
    with pytest.raises(UnknownTrial, match=r"has no trials yet"):
        sweep.view.record(0)
    sweep.add("complete", 0.5)
    with pytest.raises(UnknownTrial, match=r"no trial 7; its trials are 0 to 0"):
        sweep.view.record(7)


def test_numbers_for_people() -> None:
    assert [format_number(v) for v in (None, 3, 0.123456, 1e-5, True, "x", float("nan"))] == [
        "-",
        "3",
        "0.1235",
        "1e-05",
        "True",
        "x",
        "nan",
    ]
    assert [format_duration(s) for s in (6.6, 125, 3785)] == ["7s", "2m 05s", "1h 03m"]
    assert [format_bytes(n) for n in (512, 49488, 3 * 2**30)] == ["512 B", "48.33 KiB", "3 GiB"]


def test_show_tells_training_from_waiting(sweep: MadeSweep) -> None:
    number = sweep.add(None, 0.5)
    sweep.ledger.start(number)
    sweep.ledger.finish(number, "complete", seconds=72.0)
    found = sweep.view.trial(sweep.view.record(number))
    assert found["duration"] == 72.0
    assert found["started_at"] <= found["ended_at"]
    assert render._times(found)["duration"] == "1m 12s"
    found |= {"started_at": "2026-11-26T10:00:00+01:00", "ended_at": "2026-11-26T12:05:00+01:00"}
    assert render._times(found) == {
        "started": "2026-11-26 10:00:00",
        "ended": "2026-11-26 12:05:00",
        "duration": "1m 12s of training, 2h 05m from start to end",
    }


def test_show_has_the_medians_of_what_a_trial_did_with_its_gpu(sweep: MadeSweep) -> None:
    sweep.ledger.trial_resources = lambda _: (1.0, 0.25)
    number = sweep.add(None, 0.5)
    sweep.ledger.start(number)
    sweep.ledger.finish(number, "complete", seconds=72.0)
    assert sweep.view.details(number)["gpu_use"] is None
    rows = [
        {"step": step, "time": step, "metrics": {"gpu/utilization_percent": busy}}
        for step, busy in ((1, 20.0), (2, 90.0), (3, 22.4))
    ]
    file = sweep.paths.trial(number) / "metrics.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = sweep.view.details(number)
    assert found["gpu_use"] == {"gpu/utilization_percent": 22.4}
    text = io.StringIO()
    Console(file=text, width=200).print(render.trial(found, sweep.spec))
    assert re.search(r"gpu/utilization_percent +22 \(median\)", text.getvalue())
    file.write_text("no row\n")
    assert sweep.view.details(number)["gpu_use"] is None


def test_stopped_sweep_says_why_and_what_to_change(sweep: MadeSweep) -> None:
    sweep.add("failed", 0.5, reason="OSError: no data")
    waiting = sweep.add(None)
    abort = Abort("failures.same_failure_limit", "trials 0 and 1 failed: no data", 0, "error")
    sweep.ledger.store_abort(abort)
    view = sweep.view
    assert view.status()["stopped_by"] == {"key": abort.key, "why": abort.why}
    text = io.StringIO()
    Console(file=text, width=200).print(render.status(view.status(), view))
    said = text.getvalue().splitlines()
    assert f"it stopped itself: {abort.why}" in said
    assert "code or data, then run the failed trials again" in said[-2]
    assert " resume small --retry " in said[-1]
    assert "status small" in view.resume_hint()
    assert "resume small" not in view.resume_hint()
    sweep.ledger.finish(waiting, "pruned")
    sweep.add("complete", 0.4)
    assert sweep.view.status()["stopped_by"] is None, "the stop prevented no trial"
