"""The recorder's thread blocks no caller, raises into none, and stops in time."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.time_limits import Deadline, scaled
from tracking import delivery_loop
from tracking.delivery import TrackingServer
from tracking.delivery_loop import DeliveryThread
from tracking.outbox import SWEEP, Outbox
from tracking.outbox_status import read_outbox
from tracking.recorder import Recorder, sync
from tracking.tracker import TrackedSweep


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_loop, "_LINGER_SECONDS", 0.01)
    monkeypatch.setattr(delivery_loop, "_FIRST_DELAY_SECONDS", 0.01)


@pytest.fixture
def server(disk_server: ModuleType, tmp_path: Path) -> Iterator[Any]:
    built = disk_server.DiskServer(tmp_path / "server.db")
    yield built
    built.close()


def recorder_on(
    outbox: Path,
    open_server: Callable[[], TrackingServer],
    *,
    experiment: str = "x",
    offline: bool = False,
    **of_sweep: Any,
) -> Recorder:
    sweep = TrackedSweep(experiment=experiment, sweep_id="s1", outbox=outbox, **of_sweep)
    deliver = None if offline else lambda one: DeliveryThread(one, open_server)
    return Recorder("unused", None, sweep, deliver=deliver)


def test_recorder_calls_return_while_the_server_hangs(
    tmp_path: Path, server: Any, disk_server: ModuleType
) -> None:
    gate = threading.Event()
    server.fault = lambda _: gate.wait()
    recorder = recorder_on(tmp_path / "outbox", lambda: server)
    started = time.monotonic()
    recorder.start(0, {"lr": 1}, {})
    recorder.log(0, disk_server.lines(0, 1, disk_server.STEPS))
    recorder.finish(0, "FINISHED", {})
    assert time.monotonic() - started < scaled(1)
    started = time.monotonic()
    assert recorder.close(0.2) == recorder.pending() == 4
    assert time.monotonic() - started < scaled(1)
    gate.set()
    recorder._drain._thread.join(10)
    assert not recorder._drain.is_alive


def test_outage_is_reported_once_and_survived(
    tmp_path: Path, server: Any, disk_server: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    is_down = threading.Event()
    is_down.set()

    def fault(_: str) -> None:
        if is_down.is_set():
            raise ConnectionRefusedError("http://ada:hunter2@tracking refused")

    server.fault = fault
    with caplog.at_level(logging.INFO, "tracking"):
        recorder = recorder_on(tmp_path / "outbox", lambda: server)
        recorder.log(0, disk_server.lines(0, 1, disk_server.STEPS))
        assert recorder.flush(0.3) == 2
        is_down.clear()
        assert recorder.flush(10) == 0
        assert recorder.close(10) == 0
    assert server.points(0) == disk_server.expected(0)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "wait, the tracking server does not answer (ConnectionRefusedError: " in texts[0]
    assert "hunter2" not in texts[0]
    assert texts[1] == "the tracking server answers again"


def test_store_without_artifacts_is_reported_once_and_retried(
    tmp_path: Path, server: Any, disk_server: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    is_full = True
    tries = 0

    def fault(place: str) -> None:
        nonlocal tries
        tries += place == "before upload"
        if place == "before upload" and is_full:
            raise PermissionError(13, "Permission denied", "/mlartifacts")

    server.fault = fault
    (tmp_path / "sweep.yaml").touch()
    with caplog.at_level(logging.INFO, "tracking"):
        recorder = recorder_on(tmp_path / "outbox", lambda: server)
        recorder.artifact(None, tmp_path / "sweep.yaml", "sweep.yaml")
        for first in range(1, disk_server.STEPS, 10):
            recorder.log(0, disk_server.lines(0, first, first + 9))
            assert recorder.flush(0.05) >= 1
        assert recorder.flush(0.3) == 1
        assert server.points(0) == disk_server.expected(0)
        assert 2 < tries < 120
        assert 0.1 < recorder.seconds_unresponsive < 60
        is_full = False
        assert recorder.flush(10) == 0
        assert recorder.close(10) == 0
    assert recorder.seconds_unresponsive == 0.0
    [(path, _)] = server.files()
    assert path == "sweep.yaml"
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert texts[0].startswith("1 artifact waits: sweep.yaml of the sweep cannot be stored at ")
    assert texts[1] == "artifacts are stored again"


class LateCreate:
    """The first create of trial 0's run reaches the server after its client has given up."""

    def __init__(self, server: Any) -> None:
        self._real = server.create_run
        self._late: tuple[Any, ...] | None = None
        server.create_run = self._create

    def arrive(self) -> None:
        self._real(*self._late)

    def _create(self, experiment_id: str, start_ms: int, tags: dict[str, str]) -> str:
        if self._late is None and "gradsweep.trial" in tags:
            self._late = experiment_id, start_ms, tags
            raise TimeoutError("read timed out")
        return str(self._real(experiment_id, start_ms, tags))


@pytest.mark.parametrize("when", ["later", "at its close", "by the next process"])
def test_late_create_leaves_one_run(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    create = LateCreate(server)
    recorder = recorder_on(tmp_path / "outbox", lambda: server)
    recorder.start(0, {"lr": 1}, {})
    assert recorder.flush(10) == 0
    if when == "by the next process":
        recorder.close(10)
        recorder = recorder_on(tmp_path / "outbox", lambda: server)
        assert recorder.flush(10) == 0
    create.arrive()
    assert len(server.runs(0)) == 2
    if when == "later":
        monkeypatch.setattr(delivery_loop, "_LATE_SECONDS", 0.0)
        deadline = Deadline(10)
        while len(server.runs(0)) > 1 and not deadline.passed:
            time.sleep(0.01)
    else:
        recorder.close(10)
    [(_, params, _)] = server.runs(0)
    assert params == {"lr": "1"}
    recorder.close(10)


def test_sync_delivers_the_rest_and_a_second_adds_nothing(
    tmp_path: Path, server: Any, disk_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> TrackingServer:
        raise ConnectionRefusedError

    recorder = recorder_on(tmp_path / "outbox", refuse)
    recorder.start(0, {"lr": 1}, {})
    recorder.log(0, disk_server.lines(0, 1, disk_server.STEPS))
    recorder.finish(0, "FINISHED", {})
    assert recorder.close(0.1) == read_outbox(tmp_path / "outbox").pending == 4

    stand_in = ModuleType("tracking.mlflow_server")
    stand_in.MlflowServer = lambda *_: server  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tracking.mlflow_server", stand_in)
    for _ in range(2):
        assert sync("unused", None, "x", "s1", tmp_path / "outbox", patience=10) == 0
        assert server.points(0) == disk_server.expected(0)
        assert server.runs(0)[0][0] == "FINISHED"


def test_run_names_the_command_of_its_trial(
    tmp_path: Path, server: Any, disk_server: ModuleType
) -> None:
    outbox, commands = tmp_path / "outbox", ["at first", "later"]
    for number, command in enumerate(commands):
        tags = {"gradsweep.command": command, "gradsweep.host": "not told of a trial"}
        recorder = recorder_on(outbox, lambda: server, inherited=tags, offline=number == 0)
        for trial in range(number + 1):
            recorder.start(trial, {"lr": 1}, {})
            recorder.log(trial, disk_server.lines(trial, 1, disk_server.STEPS))
        assert (recorder.close(10) > 0) is (number == 0)
    for trial, command in enumerate(commands):
        [(_, _, tags)] = server.runs(trial)
        assert tags["gradsweep.command"] == command
        assert "gradsweep.host" not in tags


def test_sync_waits_for_another_delivery_process(tmp_path: Path, server: Any) -> None:
    other = Outbox(tmp_path / "outbox")
    assert other.try_lock()
    recorder = recorder_on(tmp_path / "outbox", lambda: server)
    assert recorder.flush(0.1) == 1
    other.close()
    assert recorder.close(10) == 0


def test_secrets_are_hidden_before_they_are_written(tmp_path: Path, server: Any) -> None:
    recorder = recorder_on(tmp_path / "outbox", lambda: server)
    params = {
        "task.api_token": "canary-1",
        "task.url": "s3://user:canary-2@bucket/x",
        "train.lr": 0.1,
    }
    recorder.start(0, params, {"note": "run with --password canary-3"})
    assert recorder.close(10) == 0
    [(_, held, tags)] = server.runs(0)
    assert held == {
        "task.api_token": "[hidden]",
        "task.url": "s3://[hidden]@bucket/x",
        "train.lr": "0.1",
    }
    assert tags["note"] == "run with --password [hidden]"
    assert b"canary" not in b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_queued_text_is_valid_for_every_store(tmp_path: Path, server: Any) -> None:
    odd, escaped = "a\udce9\0", r"a\udce9\x00"
    recorder = recorder_on(tmp_path / "outbox", lambda: server, experiment=odd)
    recorder.start(0, {"task.note": odd}, {"start": odd})
    recorder.tag(0, {"later": odd})
    recorder.finish(0, "FAILED", {"reason": odd})
    assert recorder.close(10) == 0
    [(_, params, tags)] = server.runs(0)
    assert params == {"task.note": escaped}
    assert {"start": escaped, "later": escaped, "reason": escaped}.items() <= tags.items()
    assert server.runs(SWEEP)[0][2]["mlflow.runName"] == escaped


def test_sweep_id_that_cannot_be_searched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sweep_id is \"a' or 'b\"; it must be"):
        Recorder(
            "unused", None, TrackedSweep(experiment="x", sweep_id="a' or 'b", outbox=tmp_path)
        )
