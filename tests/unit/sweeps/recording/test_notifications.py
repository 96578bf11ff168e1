"""What a sweep notifies of, and that each event has one id."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sweeps.recording.notifications import Notifier
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox_status import read_outbox
from tracking.recorder import BeforeRecords, Recorder
from tracking.tracker import TrackedSweep


class Queued(dict[str, Mapping[str, Any]]):
    """A queue that drops repeats, as that of the outbox does."""

    def add(self, key: str, body: Mapping[str, Any]) -> None:
        assert body["id"] == key
        json.dumps(body, allow_nan=False)
        self.setdefault(key, body)

    @property
    def events(self) -> list[tuple[str, int | None]]:
        return [(body["event"], body["trial"]) for body in self.values()]


def _notifier(made: MadeSweep, queued: Queued, attempt: int = 1) -> Notifier:
    return Notifier(made.paths, made.spec, "id", attempt, made.ledger, queued.add)


def _recorder(
    made: MadeSweep, notifier: Notifier, check: Callable[[], None] = lambda: None
) -> Recorder:
    sweep = TrackedSweep(experiment="small", sweep_id="id", outbox=made.paths.outbox)
    before = BeforeRecords(check, notifier.ended)
    return Recorder("unused", None, sweep, announce=False, deliver=None, before=before)


def _end(made: MadeSweep, notifier: Notifier, *ending: Any, **more: Any) -> int:
    number = made.add(*ending, **more)
    notifier.trial_ended(number)
    return number


@pytest.fixture
def made(tmp_path: Path) -> MadeSweep:
    return MadeSweep(tmp_path)


def test_each_new_best_is_notified_once(made: MadeSweep) -> None:
    queued = Queued()
    notifier = _notifier(made, queued)
    _end(made, notifier, "complete", 0.5)
    _end(made, notifier, "complete", 0.6)
    _end(made, notifier, "pruned", 0.4, reason="asha")
    _end(made, notifier, "complete", 0.45)
    notifier.trial_ended(0)
    notifier.trial_ended(2)
    assert queued.events == [("new_best", 0), ("new_best", 2)]
    body = list(queued.values())[1]
    assert body["value"] == 0.4
    assert body["params"] == made.ledger.trial(2).params
    assert body["sweep"] == "small"
    assert body["metric"] == "val/loss"
    assert body["command"].startswith("sweep show small 2")
    assert body["text"].startswith("small: trial 2 is the best so far: val/loss 0.4 (train.opt")


def test_ended_trial_is_not_the_best_while_a_running_one_is_better(made: MadeSweep) -> None:
    queued = Queued()
    notifier = _notifier(made, queued)
    running = made.add(None, 0.3)
    _end(made, notifier, "complete", 0.5)
    assert queued.events == []
    notifier.sweep_ended("INTERRUPTED", None)
    assert queued.events == [("stopped", running)]
    made.ledger.finish(running, "complete")
    notifier.trial_ended(running)
    assert queued.events[1:] == [("new_best", running)]


def test_resumed_driver_repeats_no_event(made: MadeSweep) -> None:
    queued = Queued()
    first = _notifier(made, queued)
    _end(made, first, "complete", 0.5)
    made.add("complete", 0.3)  # the driver is killed after the ledger has its end
    second = _notifier(made, queued, attempt=2)
    for number in (0, 1):  # reconciliation records both ends
        second.trial_ended(number)
    assert queued.events == [("new_best", 0), ("new_best", 1)]


def test_trial_on_pareto_front_is_notified(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, metric="[val/loss, val/accuracy]", mode="[min, max]")
    queued = Queued()
    notifier = _notifier(made, queued)
    for values in ([0.5, 0.5], [0.6, 0.4], [0.4, 0.3]):
        _end(made, notifier, "complete", values)
    assert queued.events == [("new_best", 0), ("new_best", 2)]
    assert [body["value"] for body in queued.values()] == [[0.5, 0.5], [0.4, 0.3]]
    notifier.sweep_ended("FINISHED", None)
    assert queued.events[-1] == ("finished", None)  # several trials are the best


def test_failed_trial_is_notified_with_reason(made: MadeSweep) -> None:
    queued = Queued()
    notifier = _notifier(made, queued)
    _end(made, notifier, "failed", 0.1, reason=f"ValueError: token=canary {'x' * 5000}")
    (body,) = queued.values()
    assert (body["event"], body["trial"], body["value"]) == ("trial_failed", 0, None)
    assert body["reason"].startswith("ValueError: token=[hidden]")
    assert len(body["text"]) < 1200


@pytest.mark.parametrize(
    ("status", "tags", "event", "reason"),
    [
        ("FINISHED", {}, "finished", None),
        ("FINISHED", {"stopped_by": "stop.hours"}, "finished", "stopped by stop.hours"),
        ("FAILED", {"reason": "3 trials failed"}, "failed", "3 trials failed"),
        ("INTERRUPTED", {"stopped_by": "interrupt"}, "stopped", "stopped by interrupt"),
    ],
)
def test_end_of_sweep_is_notified(
    made: MadeSweep, status: Any, tags: dict[str, str], event: str, reason: str | None
) -> None:
    made.add("complete", 0.5)
    made.add("failed", reason="ValueError")
    queued = Queued()
    _recorder(made, _notifier(made, queued)).finish(None, status, tags)
    (body,) = queued.values()
    assert (body["event"], body["reason"]) == (event, reason)
    assert (body["trial"], body["value"]) == (0, 0.5)
    assert body["trials"] == {"complete": 1, "pruned": 0, "failed": 1}
    assert "2 of 3 trials" in body["text"]
    assert "best is trial 0: val/loss 0.5 (" in body["text"]
    assert reason is None or reason in body["text"]
    assert read_outbox(made.paths.outbox).tracked_sweep_status == status


def test_finished_sweep_is_news_only_with_more_trials(made: MadeSweep) -> None:
    queued = Queued()
    made.add("complete", 0.5)
    for attempt in (1, 2):
        _notifier(made, queued, attempt).sweep_ended("FINISHED", None)
    assert queued.events == [("finished", 0)]
    made.add("complete", 0.4)
    _notifier(made, queued, 3).sweep_ended("FINISHED", None)
    assert queued.events == [("finished", 0), ("finished", 1)]


def test_event_is_queued_before_its_end_is_recorded(made: MadeSweep) -> None:
    """Else a driver that is killed between the two would never notify."""
    recorded: list[int] = []

    def queue(key: str, body: Mapping[str, Any]) -> None:
        del key, body
        recorded.append(recorder.pending())

    notifier = Notifier(made.paths, made.spec, "id", 1, made.ledger, queue)
    recorder = _recorder(made, notifier)
    number = made.add("complete", 0.5)
    recorder.finish(number, "FINISHED", {})
    recorder.finish(None, "FINISHED", {})
    assert recorded == [0, 1]
    assert recorder.pending() == 2


def test_driver_without_lock_notifies_of_nothing(made: MadeSweep) -> None:
    class Lost(Exception):
        pass

    def fence() -> None:
        raise Lost

    queued = Queued()
    recorder = _recorder(made, _notifier(made, queued), fence)
    number = made.add("complete", 0.5)
    with pytest.raises(Lost):
        recorder.finish(number, "FINISHED", {})
    assert not queued
