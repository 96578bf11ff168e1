"""What the callbacks record of a report, leave to Tune, and no longer write without the lock."""

from __future__ import annotations

import copy
import errno
import socket
from collections.abc import Callable
from numbers import Number
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.experiment import Trial

from sweeps.errors import LockLost, SpecError
from sweeps.ledger.reasons import BY_THE_USER
from sweeps.reconcile.failure_policy import MAX_LOST_STARTS
from sweeps.run.tune_callbacks import TuneEventHandler
from sweeps.run.worker_watch import NoWorkerStarts, StartWatch, WorkerRules
from sweeps.stopping.schedulers import WouldStop, make_scheduler
from sweeps.sweep_lock import SweepLock
from sweeps.view.observer import TrialProgress
from tests.memory_recorder import MemoryRecorder
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.unsent_rows import Target
from trainable.adapters.ray import OBJECTIVE, OBJECTIVES
from trainable.errors import NodeLeaves

_METRICS = {"val/loss": 0.5, "val/accuracy": 0.75, "train/loss": 0.6, "train/lr": 0.1}


def _result() -> dict[str, Any]:
    """A report as it comes from Tune, which adds times, counts and the configuration to ours."""
    return {
        OBJECTIVE: 0.5,
        "epoch": 1,
        "step": 23,
        "metrics": _METRICS,
        "signals": ["the loss jumped"],
        "resolved": {"device": "cpu", "precision": "fp32"},
        "should_checkpoint": False,
        "done": True,
        "ending": "finished",
        "training_iteration": 1,
        "time_total_s": 1.5,
        "time_this_iter_s": 1.5,
        "time_since_restore": 1.5,
        "iterations_since_restore": 1,
        "config": {"number": 0, "config": {"train": {"batch_size": 64}}},
    }


def _trial(number: int, **more: Any) -> Any:
    """A trial of Tune."""
    config = {"number": number, "params": {}, "seed": ("trial", number)}
    return SimpleNamespace(config=config, **more)


def _silent(*verbs: str) -> Any:
    """A progress display that shows nothing of these events."""
    return SimpleNamespace(**dict.fromkeys(verbs, lambda *_: None))


def test_tune_keeps_only_result_keys_it_needs(tmp_path: Path) -> None:
    sweep, recorder = MadeSweep(tmp_path), MemoryRecorder()
    number = sweep.add(None)
    shown: list[TrialProgress] = []
    view: Any = SimpleNamespace(reported=shown.append)
    keeper = sweep.handler(recorder, view)
    trial = _trial(number)
    recorder.start(number, {}, {})

    result = _result()
    keeper.on_trial_result(0, [trial], trial, result)
    keeper.flush()

    numbers = {key for key, value in result.items() if isinstance(value, Number)}
    assert numbers == {OBJECTIVE, "epoch", "should_checkpoint", "done", "training_iteration"}
    assert not [key for key, value in result.items() if isinstance(value, dict | list)]
    assert result["ending"] == "finished"
    assert shown == [TrialProgress(number, {}, 1, 23, _METRICS)]
    tags = recorder.runs[number].tags
    assert (tags["gradsweep.device"], tags["gradsweep.precision"]) == ("cpu", "fp32")
    record = sweep.ledger.trial(number)
    assert (record.reports, record.step) == ({1: 0.5}, 23)
    assert record.signals == ("the loss jumped",)


@pytest.mark.parametrize("fails", [False, True])
def test_buffered_reports_are_all_recorded(tmp_path: Path, fails: bool) -> None:
    sweep, recorder = MadeSweep(tmp_path), MemoryRecorder()
    number = sweep.add(None)
    shown: list[int] = []
    view: Any = SimpleNamespace(reported=lambda progress: shown.append(progress.epoch))
    keeper = sweep.handler(recorder, view)
    trial = _trial(number)
    recorder.start(number, {}, {})
    first, second, last = (
        {
            OBJECTIVE: 1 / epoch,
            "epoch": epoch,
            "step": 23 * epoch,
            "metrics": _METRICS,
            "signals": ["the loss jumped"] if epoch > 1 else [],
        }
        for epoch in (1, 2, 3)
    )
    result = {"ending": "failed", "done": True} if fails else dict(last)

    keeper.on_trial_result(0, [trial], trial, result | {"earlier": [first, second]})
    keeper.flush()

    told = [1, 2] if fails else [1, 2, 3]
    assert shown == told
    record = sweep.ledger.trial(number)
    assert record.reports == {epoch: 1 / epoch for epoch in told}
    assert record.signals == ("the loss jumped",)
    assert recorder.runs[number].target == Target(23 * told[-1], every=1, ended=False)

    again = dict(last)  # as by a run that had ended already
    del again["signals"]
    keeper.on_trial_result(0, [trial], trial, again)
    keeper.flush()
    assert sweep.ledger.trial(number).signals == ("the loss jumped",)
    well = {"epoch": 4, "step": 92, "signals": []}
    keeper.on_trial_result(0, [trial], trial, dict(last) | well)
    keeper.flush()
    assert sweep.ledger.trial(number).signals == ()
    assert recorder.runs[number].tags["health"] == ""


def test_the_mark_of_a_state_without_a_model_follows_the_best_state(tmp_path: Path) -> None:
    sweep, recorder = MadeSweep(tmp_path), MemoryRecorder()
    number = sweep.add(None)
    recorder.start(number, {}, {})
    said = []
    for mark in ({"lacks_model": True}, {}, {"lacks_model": False}):  # a driver for each
        view = _silent("reported", "started")
        keeper = sweep.handler(recorder, view)
        trial = _trial(number)
        keeper.on_trial_start(0, [trial], trial)
        keeper.on_trial_result(0, [trial], trial, _result() | {"ending": "running"} | mark)
        keeper.flush()
        said.append(sweep.ledger.trial(number).lacks_model)
    assert said == [True, True, False]


def test_where_an_exempt_trial_would_stop_is_kept_once(tmp_path: Path) -> None:
    sweep, recorder = MadeSweep(tmp_path), MemoryRecorder()
    number = sweep.add(None)
    recorder.start(number, {}, {})
    found: dict[int, WouldStop] = {}
    view = _silent("reported")
    keeper = sweep.handler(recorder, view)
    keeper._scheduler.would_stop = found
    trial: Any = SimpleNamespace(config={"number": number, "params": {}, "exempt": True})
    for epoch, would_stop in ((1, None), (2, (2, "asha at epoch 2")), (3, None)):
        if would_stop is not None:
            found[number] = WouldStop(*would_stop)
        result = {**_result(), "epoch": epoch, "ending": None, OBJECTIVES: (0.5, 0.75)}
        keeper.on_trial_result(0, [trial], trial, result)
        assert OBJECTIVES not in result
    keeper.flush()
    record = sweep.ledger.trial(number)
    assert (record.would_stop_at, record.would_stop_reason) == (2, "asha at epoch 2")
    assert record.compared_reports.keys() == {1, 2}
    assert record.reports.keys() == {1, 2, 3}
    last = {**_result(), "epoch": 4, OBJECTIVES: (0.5, 0.75)}
    keeper.on_trial_result(0, [trial], trial, last)
    assert last[OBJECTIVES] == (0.5, 0.75), "the scheduler judges it at the trial's end"


def test_losses_with_a_whole_node_are_not_counted(tmp_path: Path) -> None:
    """Where workers alone are lost, the third in a row without progress is one too many."""
    sweep = MadeSweep(tmp_path)
    number = sweep.add(None)
    with_the_node = RuntimeError("its node died")
    alone = RuntimeError("the process of rank 1 was lost: killed")
    trial = _trial(number)
    said: list[str] = []
    view: Any = SimpleNamespace(
        started=lambda *_: None, warned=lambda _, sentence: said.append(sentence)
    )
    keeper = sweep.handler(MemoryRecorder(), view, node_died=lambda error: error is with_the_node)
    given_up = []
    for error in [*[with_the_node] * 5, *[alone] * 3]:
        trial.get_pickled_error = lambda error=error: error
        keeper.on_trial_start(0, [trial], trial)
        keeper.on_trial_recover(0, [trial], trial)
        given_up.append(sweep.paths.stop(number).exists())
    assert given_up == [False] * 7 + [True]
    keeper.flush()
    assert ["node" in one for one in said] == [True] * 5 + [False] * 2
    assert all("rank 1" in one for one in said[5:])
    assert sweep.ledger.trial(number).lost_workers == tuple(said)


def test_moves_to_another_node_are_not_counted(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    number = sweep.add(None)
    trial = _trial(number, get_pickled_error=lambda: RuntimeError(f"a: {NodeLeaves.text}"))
    said: list[str] = []
    view: Any = SimpleNamespace(
        started=lambda *_: None, warned=lambda _, sentence: said.append(sentence)
    )
    keeper = sweep.handler(MemoryRecorder(), view)
    for _ in range(5):
        keeper.on_trial_start(0, [trial], trial)
        keeper.on_trial_recover(0, [trial], trial)
        keeper.on_trial_recover(0, [trial], trial)  # a worker that begins with no trial
    keeper.flush()
    assert not sweep.paths.stop(number).exists()
    sentence = f"{NodeLeaves.text}: nothing was to save yet, and continues on another node"
    assert said == [sentence] * 5
    assert sweep.ledger.trial(number).lost_workers == tuple(said)


def test_sweep_ends_if_ray_starts_no_worker(tmp_path: Path) -> None:
    sweep, now = MadeSweep(tmp_path), [100.0]
    number = sweep.add(None)
    trial = _trial(number, status=Trial.PENDING, get_pickled_error=lambda: None)
    view = _silent("started", "ended", "warned")
    keeper = sweep.handler(MemoryRecorder(), view)
    keeper._starts = StartWatch(60.0, lambda: now[0])

    def turns(count: int) -> None:
        for _ in range(count):
            now[0] += 1
            keeper.on_step_begin(0, [trial])

    turns(50)
    now[0] += 3600  # the driver was suspended
    turns(2)
    keeper.on_trial_start(0, [trial], trial)
    turns(200)  # another trial may wait as long as this one trains
    keeper.on_trial_recover(0, [trial], trial)
    turns(60)
    with pytest.raises(NoWorkerStarts):
        turns(1)
    assert keeper.abort_reason is not None
    assert keeper.abort_reason.failure.reason.startswith("lost: Ray has started no worker for 1m")
    keeper.interrupt_live()
    assert not sweep.ledger.trial(number).finished, "it goes on when the sweep does"


def test_unstarted_trial_counts_no_loss(tmp_path: Path) -> None:
    sweep, recorder = MadeSweep(tmp_path), MemoryRecorder()
    number = sweep.add(None)
    trial = _trial(number, max_failures=-1)
    trial.get_pickled_error = lambda: RuntimeError("its worker died")
    view = _silent("started", "ended", "warned")
    keeper = sweep.handler(recorder, view)
    for _ in range(2):  # and what is lost before a start is forgotten with it
        for _ in range(MAX_LOST_STARTS - 1):
            keeper.on_trial_recover(0, [trial], trial)
        keeper.on_trial_start(0, [trial], trial)
        keeper.on_trial_recover(0, [trial], trial)
    assert (trial.max_failures, sweep.paths.stop(number).exists()) == (-1, False)
    for _ in range(MAX_LOST_STARTS):
        keeper.on_trial_recover(0, [trial], trial)
    assert trial.max_failures == 0
    assert keeper.abort_reason is None
    keeper.on_trial_error(0, [trial], trial)
    keeper.flush()
    assert keeper.abort_reason is not None
    assert keeper.abort_reason.failure.reason.startswith("lost: 6 workers in a row ended before")
    assert not sweep.ledger.trial(number).finished, "it goes on when the sweep does"


Act = Callable[[TuneEventHandler, Any], object]
_ENDINGS = {
    "finished": {"ending": "finished"},
    "failed": {"ending": "failed", "failure": {"kind": "oom", "reason": "oom", "traceback": ""}},
    "interrupted": {"ending": "interrupted"},
    "pruned": {},
}


def _ends(ending: str) -> Act:
    def end(keeper: TuneEventHandler, trial: Any) -> None:
        trial.last_result = _ENDINGS[ending]
        keeper.on_trial_complete(0, [trial], trial)

    return end


def _is_lost_for_good(keeper: TuneEventHandler, trial: Any) -> None:
    keeper._trials[trial.config["number"]].is_training = True
    keeper.on_trial_error(0, [trial], trial)


ACTS: dict[str, Act] = {
    "starts": lambda keeper, trial: keeper.on_trial_start(0, [trial], trial),
    "reports": lambda keeper, trial: keeper.on_trial_result(0, [trial], trial, _result()),
    "is lost": lambda keeper, trial: [keeper.on_trial_recover(0, [], trial) for _ in range(3)],
    "is lost for good": _is_lost_for_good,
    "is to stop": lambda keeper, _: keeper.stop(0, "enough", live=True),
    "is stopped": lambda keeper, _: keeper.stop(0, "enough", live=False),
    "is refused": lambda keeper, trial: keeper.refuse(trial.config["number"], SpecError([])),
    "is left behind": lambda keeper, _: keeper.interrupt_live(),
    **{f"ends: {ending}": _ends(ending) for ending in _ENDINGS},
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_driver_without_the_lock_writes_nothing(tmp_path: Path, act: Act) -> None:
    """It looked at its lock at the beginning of Tune's turn, stood still, and was replaced."""
    sweep = MadeSweep(tmp_path)
    number = sweep.add(None, 0.5)
    lock, successor = SweepLock(sweep.paths.lock), SweepLock(sweep.paths.lock)
    recorder = MemoryRecorder(lock.check)
    lock.acquire()
    view = _silent("started")
    keeper = TuneEventHandler(
        sweep.session(recorder, lock.check),
        view,
        make_scheduler(sweep.spec),
        WorkerRules(),
        on_step=lock.check,
    )
    config = sweep.spec.trial_config(number, sweep.ledger.trial(number).params)
    told = {
        "number": number,
        "params": {},
        "seed": ("trial", number),
        "config": config.model_dump(mode="json"),
    }
    trial: Any = SimpleNamespace(config=told, get_pickled_error=lambda: None)
    keeper.on_trial_start(0, [trial], trial)
    keeper.flush()
    keeper.on_step_begin(0, [trial])

    sweep.paths.lock.unlink()
    successor.acquire()
    before = _everything(sweep, recorder)

    def act_and_settle() -> None:
        act(keeper, trial)
        keeper.flush()

    with pytest.raises(LockLost):
        act_and_settle()
    assert _everything(sweep, recorder) == before
    successor.release()
    lock.release()


def _everything(sweep: MadeSweep, recorder: MemoryRecorder) -> tuple[Any, ...]:
    """The ledger, the trials' files and requests to them, and what was recorded."""
    files = [path for path in sorted(sweep.paths.directory.rglob("*")) if path.is_file()]
    contents = {path: path.read_bytes() for path in files}
    return sweep.ledger.trials(), contents, copy.deepcopy(recorder.runs)


@pytest.mark.parametrize(
    ("number", "elsewhere", "writable", "own"),
    [
        pytest.param(errno.EFBIG, False, True, True, id="a limit on file sizes"),
        pytest.param(errno.EMFILE, True, True, True, id="a limit on files, on another host"),
        pytest.param(errno.EACCES, False, True, True, id="permissions the process gave up"),
        pytest.param(errno.EACCES, True, True, False, id="permissions of another host"),
        pytest.param(errno.EFBIG, False, False, False, id="the sweep is refused, too"),
        pytest.param(errno.ENOSPC, False, True, False, id="a disk that had no room"),
        pytest.param(None, False, True, False, id="a store that said nothing"),
    ],
)
def test_error_in_the_trial_process_fails_that_trial(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int | None,
    elsewhere: bool,
    writable: bool,
    own: bool,
) -> None:
    sweep, recorder = MadeSweep(tmp_path), MemoryRecorder()
    trial_number = sweep.add(None)
    if not writable:

        def refuse(path: Path) -> None:
            raise OSError(errno.EIO, "refused", str(path))

        monkeypatch.setattr("sweeps.stores.probe_directory", refuse)
        sweep.paths.trial(trial_number).mkdir(parents=True, exist_ok=True)
    view = _silent("ended")
    keeper = sweep.handler(recorder, view)
    recorder.start(trial_number, {}, {})
    said = "[Errno 27] File too large: 'state.pt'"
    failure = {
        "kind": "storage",
        "reason": f"storage: the checkpoint could not be written: {said}; free space",
        "traceback": "",
        "place": "checkpoint.py:1",
        "errno": number,
        "system": said,
        "host": "elsewhere" if elsewhere else socket.gethostname(),
    }
    last = {"ending": "failed", "failure": failure}
    trial: Any = SimpleNamespace(config={"number": trial_number}, last_result=last)
    keeper.on_trial_complete(0, [trial], trial)
    keeper.flush()
    record = sweep.ledger.trial(trial_number)
    assert (keeper.abort_reason is None) == own
    assert (record.state == "failed") == own
    if own:
        assert record.reason is not None
        assert record.reason.startswith(f"limit: {said}")
        assert "free space" not in record.reason


@pytest.mark.parametrize("requested", [True, False])
def test_requested_stop_counts_although_the_trial_drained(
    tmp_path: Path, *, requested: bool
) -> None:
    """A trial that drains may look for its stop request before the driver has written it."""
    sweep, recorder = MadeSweep(tmp_path), MemoryRecorder()
    number = sweep.add(None, 0.5)
    view = _silent("ended")
    keeper = sweep.handler(recorder, view)
    recorder.start(number, {}, {})
    if requested:
        keeper.stop(number, BY_THE_USER, live=True)
    last = {"ending": "interrupted"}
    trial: Any = SimpleNamespace(config={"number": number}, last_result=last)
    keeper.on_trial_complete(0, [trial], trial)
    keeper.flush()
    record, run = sweep.ledger.trial(number), recorder.runs[number]
    expected = ("pruned", BY_THE_USER, "user") if requested else ("running", None, "interrupt")
    assert (record.state, record.reason, run.tags["stopped_by"]) == expected
