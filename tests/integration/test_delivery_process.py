"""The delivery process: it ends with its driver, and survives kills at any time."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.integration.commandline import wait_until
from tests.integration.sweep_runs import runs_of_sweep
from tests.time_limits import scaled
from tracking.delivery_loop import DeliveryProcess
from tracking.outbox_status import read_outbox
from tracking.recorder import Recorder, process_with, sync
from tracking.tracker import TrackedSweep

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
LONG = 60

DRIVER = """
import os, sys, time
from pathlib import Path
from tracking.outbox_status import read_outbox
from tracking.recorder import Recorder, process_with
from tracking.tracker import TrackedSweep
from tracking.metric_points import PointRow
uri, outbox = sys.argv[1:]
sweep = TrackedSweep(experiment="digits", sweep_id="one", outbox=Path(outbox))
recorder = Recorder(uri, None, sweep, deliver=process_with(os.environ))
recorder.start(0, {"lr": 1}, {})
recorder.log(0, [PointRow(step, step, {"loss": 1 / step}) for step in range(1, 51)])
while read_outbox(Path(outbox)).sweep_run_id is None:
    time.sleep(0.05)
assert "mlflow" not in sys.modules
print(recorder._drain._process.pid, flush=True)
sys.stdin.read()
"""


class Line(NamedTuple):
    step: int
    timestamp_ms: int
    metrics: dict[str, float]


def lines(first: int, last: int) -> list[Line]:
    return [Line(step, step, {"loss": 1 / step}) for step in range(first, last + 1)]


def recorder_on(uri: str, outbox: Path) -> Recorder:
    sweep = TrackedSweep(experiment="digits", sweep_id="one", outbox=outbox)
    return Recorder(uri, None, sweep, deliver=process_with(os.environ))


def wait_for_run(outbox: Path) -> None:
    wait_until(lambda: read_outbox(outbox).sweep_run_id is not None, seconds=scaled(LONG))


def steps(uri: str) -> list[int]:
    """The steps of trial 0, as often as they were recorded."""
    from mlflow import MlflowClient

    run = runs_of_sweep(uri, "digits", "one")[0]
    history = MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, "loss")
    return sorted(point.step for point in history)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def test_delivers_through_kills_and_signals(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_on(uri, tmp_path / "outbox")
    recorder.start(0, {"lr": 1}, {})
    recorder.log(0, lines(1, 50))
    first = psutil.Process(recorder._drain._process.pid)
    # A niceness would not do: that of Ray's workers is 15.
    assert os.sched_getscheduler(first.pid) == os.SCHED_IDLE
    recorder.flush(0.0)
    if os.geteuid() == 0:  # others may not take it out of that class
        assert {os.sched_getscheduler(one.id) for one in first.threads()} == {os.SCHED_OTHER}
        assert first.nice() == os.getpriority(os.PRIO_PROCESS, 0)
    wait_for_run(tmp_path / "outbox")
    for signum in (signal.SIGINT, signal.SIGTERM):
        first.send_signal(signum)
    assert recorder.flush(LONG) == 0
    assert first.is_running()
    first.kill()
    recorder.log(0, lines(1, 120))
    assert recorder.flush(LONG) == 0
    recorder.finish(0, "FINISHED", {})
    with caplog.at_level(logging.WARNING, "tracking"):
        assert recorder.close(LONG) == recorder.pending() == 0
    assert steps(uri) == list(range(1, 121))
    assert "ended (exit code -9); another one is started" in caplog.text
    assert not psutil.pid_exists(recorder._drain._process.pid)


@pytest.mark.chaos
def test_restarts_when_killed_during_a_request(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, may_restart = DeliveryProcess._start, threading.Event()
    recorder = recorder_on(uri, tmp_path / "outbox")
    wait_for_run(tmp_path / "outbox")
    first = psutil.Process(recorder._drain._process.pid)

    def later(drain: DeliveryProcess) -> subprocess.Popen[str]:
        may_restart.wait(LONG)
        return start(drain)

    monkeypatch.setattr(DeliveryProcess, "_start", later)
    first.kill()
    wait_until(lambda: not first.is_running(), seconds=10)
    recorder._drain.flush_now(True)
    may_restart.set()
    recorder.start(0, {"lr": 1}, {})
    recorder.log(0, lines(1, 50))
    assert recorder.flush(LONG) == recorder.close(LONG) == 0
    assert steps(uri) == list(range(1, 51))


def test_ends_with_a_killed_driver(tmp_path: Path, uri: str) -> None:
    command = [sys.executable, "-c", DRIVER, uri, str(tmp_path / "outbox")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        number = int(driver.stdout.readline())
        assert psutil.pid_exists(number)
        driver.kill()
    wait_until(lambda: not psutil.pid_exists(number), seconds=10)
    assert sync(uri, None, "digits", "one", tmp_path / "outbox", patience=LONG) == 0
    assert steps(uri) == list(range(1, 51))
