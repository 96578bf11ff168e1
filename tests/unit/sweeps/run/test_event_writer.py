"""The writes of a trial and their order; Tune's loop does not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeps.errors import LedgerError, LockLost
from sweeps.ledger.attributes import ACCUMULATION, SIGNALS
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.storage import StudyStorage
from sweeps.run.tune_callbacks import TuneEventHandler
from sweeps.run.worker_watch import WorkerRules
from sweeps.stopping.schedulers import make_scheduler
from sweeps.sweep_lock import lock_lost
from tests.memory_recorder import MemoryRecorder
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.adapters.ray import OBJECTIVE


class Diary:
    """What was done, in order: each look at the lock, each record, each commit, each thing that
    was shown.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.commits = 0

    def note(self, what: str) -> Callable[..., None]:
        return lambda *_, **__: self.done.append(what)

    def of(self, owner: Any, name: str, what: str) -> Callable[..., Any]:
        real = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            self.done.append(what)
            return result

        return noted


class Kept:
    """A bookkeeper of one running trial, with what it did."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.sweep, self.diary = MadeSweep(root), Diary()
        self.recorder = MemoryRecorder(self.fence)
        self.lost: BaseException | None = None
        diary = self.diary
        self.number = self.sweep.add(None)
        for verb in ("start", "follow", "tag", "finish"):
            noted = diary.of(self.recorder, verb, f"recorder.{verb}")
            patch.setattr(self.recorder, verb, noted)
        real = StudyStorage.transact
        within = False

        def transact(storage: Any, work: Any) -> Any:
            nonlocal within
            if within:
                return real(storage, work)
            within = True
            try:
                done = real(storage, work)
            finally:
                within = False
            assert diary.may_commit.wait(30)
            diary.commits += 1
            diary.done.append("commit")
            return done

        patch.setattr(StudyStorage, "transact", transact)
        view: Any = SimpleNamespace(
            **{
                verb: diary.note(f"view.{verb}")
                for verb in ("started", "reported", "paused", "ended", "promoted", "warned")
            }
        )
        self.keeper = TuneEventHandler(
            self.sweep.session(self.recorder, self.fence),
            view,
            make_scheduler(self.sweep.spec),
            WorkerRules(),
            on_step=diary.note("turn"),
        )
        config = self.sweep.spec.trial_config(
            self.number, self.sweep.ledger.trial(self.number).params
        )
        self.trial: Any = SimpleNamespace(
            config={
                "number": self.number, "params": {}, "seed": ("trial", self.number),
                "config": config.model_dump(mode="json"),
            },
            last_result={},
        )  # fmt: skip

    def fence(self) -> None:
        self.diary.done.append("fence")
        if self.lost is not None:
            raise self.lost

    def starts(self) -> None:
        self.keeper.on_trial_start(0, [], self.trial)

    def reports(self, epoch: int, *, number: int | None = None, **more: Any) -> None:
        trial = self.trial
        if number is not None:
            trial = SimpleNamespace(config={**self.trial.config, "number": number})
        metrics = {"val/loss": 1 / epoch}
        result = {
            OBJECTIVE: 1 / epoch, "epoch": epoch, "step": epoch, "metrics": metrics,
            "signals": [], **more,
        }  # fmt: skip
        trial.last_result = result
        self.keeper.on_trial_result(0, [], trial, result)

    def ends(self, **last: Any) -> None:
        self.trial.last_result = last or self.trial.last_result
        self.keeper.on_trial_complete(0, [], self.trial)

    def written(self) -> list[str]:
        """What was done since the last time, once nothing waits."""
        self.keeper.flush()
        done, self.diary.done[:] = list(self.diary.done), []
        return done


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    kept = Kept(tmp_path, monkeypatch)
    yield kept
    kept.diary.may_commit.set()
    kept.keeper.close()


_RECORDED = ["fence", "recorder.follow", "fence", "recorder.finish"]


def test_report_reaches_the_ledger_before_tracking_and_display(kept: Kept) -> None:
    kept.reports(1, signals=["the loss jumped"])
    assert kept.diary.commits == 1, "nobody else could tell of signals again"
    assert kept.written() == [
        "fence", "commit", "fence", "recorder.tag", "fence", "recorder.follow", "view.reported",
    ]  # fmt: skip
    record = kept.sweep.ledger.trial(kept.number)
    assert (record.reports, record.signals) == ({1: 1.0}, ("the loss jumped",))


def test_end_that_the_ledger_rejects_is_sent_nowhere(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise LedgerError("the disk is full")

    kept.starts()
    kept.written()
    monkeypatch.setattr(Ledger, "finish", refuse)
    kept.ends(ending="failed", failure={"kind": "error", "reason": "a disk", "traceback": ""})
    with pytest.raises(LedgerError):
        kept.keeper.flush()
    run = kept.recorder.runs[kept.number]
    assert (run.status, "reason" in run.tags) == ("RUNNING", False)


def test_last_report_and_end_share_a_transaction_once_stored(kept: Kept) -> None:
    kept.reports(1, ending="finished", saved=True)
    kept.ends()
    assert kept.written() == [
        "fence", "commit", *_RECORDED, "view.reported", "view.ended",
    ]  # fmt: skip
    record = kept.sweep.ledger.trial(kept.number)
    assert (record.state, record.reports, record.value) == ("complete", {1: 1.0}, 1.0)
    assert kept.recorder.runs[kept.number].tags["best_epoch"] == "1"


@pytest.mark.parametrize("what", ["is read", "is lost", "is interrupted", "fails"])
def test_last_report_is_written_before_any_end(kept: Kept, what: str) -> None:
    kept.reports(1, ending="finished", saved=True)
    kept.trial.get_pickled_error = lambda: None
    match what:
        case "is lost":
            kept.keeper.on_trial_recover(0, [], kept.trial)
        case "is interrupted":
            kept.keeper._trials[kept.number].phase = "live"
            kept.keeper.interrupt_live()
        case "fails":
            kept.keeper.on_trial_error(0, [], kept.trial)
    kept.keeper.flush()
    assert kept.sweep.ledger.trial(kept.number).reports == {1: 1.0}


def test_slow_ledger_delays_nobody(kept: Kept) -> None:
    """Nor for several trials together, whose reports then are one transaction."""
    other = kept.sweep.add(None)
    kept.diary.commits, kept.diary.done[:] = 0, []
    kept.diary.may_commit.clear()
    kept.keeper._num_existing = 0  # it was added by this driver
    kept.starts()
    for epoch in range(1, 6):
        kept.reports(epoch)
        kept.reports(epoch, number=other)
        kept.keeper.on_step_begin(0, [])
    kept.ends()
    kept.keeper.on_step_begin(0, [])
    assert kept.diary.commits == 0
    assert kept.keeper.num_finished == 1
    kept.diary.may_commit.set()
    kept.keeper.flush()
    # The start, the reports, and the end; one of them came first, if not more.
    assert 3 <= kept.diary.commits <= 4
    for number in (kept.number, other):
        assert kept.sweep.ledger.trial(number).reports == {n: 1 / n for n in range(1, 6)}
    assert kept.sweep.ledger.trial(kept.number).finished


def test_irrecoverable_events_are_recorded_immediately(kept: Kept) -> None:
    """A driver that dies before the ledger knows has told with what a trial began, and on what."""
    kept.diary.may_commit.clear()
    kept.keeper._num_existing = 0  # it was added by this driver
    kept.starts()
    kept.reports(1, resolved={"device": "cpu"}, set_aside=["generation 3: damaged"])
    run = kept.recorder.runs[kept.number]
    assert run.params["train.batch_size"] == "64"
    told = {"attempts": "1", "device": "cpu"}
    assert {f"gradsweep.{key}": value for key, value in told.items()}.items() <= run.tags.items()
    assert run.tags["checkpoint.set_aside"] == "generation 3: damaged"
    assert kept.diary.commits == 0


@pytest.mark.parametrize("ends", [False, True])
def test_ledger_attributes_of_a_trial_are_resent(kept: Kept, ends: bool) -> None:
    """Its driver may have died between the two."""
    kept.sweep.ledger.start(kept.number)
    kept.sweep.ledger.set_attr(kept.number, SIGNALS, ["the loss jumped"])
    kept.sweep.ledger.set_attr(kept.number, ACCUMULATION, 2)
    if ends:
        kept.recorder.start(kept.number, {}, {})
        kept.ends()
    else:
        kept.starts()
    kept.keeper.flush()
    tags = kept.recorder.runs[kept.number].tags
    assert (tags["health"], tags["gradsweep.accumulation"]) == ("the loss jumped", "2")
    assert tags["gradsweep.attempts"] == ("1" if ends else "2")


def test_replaced_driver_stops_writing(kept: Kept) -> None:
    """It stood still after the first of several reports."""
    others = [kept.sweep.add(None) for _ in range(3)]
    kept.diary.may_commit.clear()
    for number in (kept.number, *others):
        kept.reports(1, number=number)
    follow, lost = kept.recorder.follow, lock_lost("it is another's", kept.sweep.paths.directory)

    def follow_and_stand_still(*told: Any, **more: Any) -> None:
        follow(*told, **more)
        kept.lost = lost

    kept.recorder.follow = follow_and_stand_still  # type: ignore[method-assign]
    kept.diary.may_commit.set()
    with pytest.raises(LockLost):
        kept.keeper.flush()
    assert kept.diary.done.count("recorder.follow") == 1


def test_error_is_raised_at_next_call_and_writing_stops(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = LedgerError("the disk is full")

    def refuse(*_: Any) -> None:
        kept.diary.done.append("refused")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "report_all", refuse)
        kept.reports(1)
        with pytest.raises(LedgerError):
            kept.keeper.flush()
    kept.diary.done.clear()
    acts: list[Callable[[], object]] = [
        lambda: kept.keeper.on_step_begin(0, []),
        lambda: kept.reports(2),
        kept.ends,
        kept.keeper.flush,
        kept.keeper.interrupt_live,
        lambda: kept.keeper.stop(kept.number, "enough", live=False),
    ]
    for act in acts:
        with pytest.raises(LedgerError) as caught:
            act()
        assert caught.value is error
    kept.keeper.close()
    assert set(kept.diary.done) <= {"fence"}
    record = kept.sweep.ledger.trial(kept.number)
    assert (record.reports, record.finished) == ({}, False)


def test_training_time_is_written_with_each_event(kept: Kept) -> None:
    now = 0.0
    kept.keeper._clock._clock = lambda: now
    kept.starts()
    now = 2.0
    kept.reports(1)
    kept.written()
    assert kept.sweep.ledger.trial(kept.number).seconds == 2.0
    now = 3.0
    kept.ends(ending="interrupted")
    now = 50.0
    kept.written()
    assert kept.sweep.ledger.trial(kept.number).seconds == 3.0
    kept.starts()
    now = 54.0
    kept.reports(2, ending="finished")
    kept.ends()
    now = 90.0
    kept.written()
    record = kept.sweep.ledger.trial(kept.number)
    assert (record.state, record.seconds, record.attempts) == ("complete", 7.0, 2)
