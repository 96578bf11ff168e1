"""The process that is there before a sweep's report is wanted: real ones, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sweeps.paths import SweepPaths
from sweeps.publishing import report_worker as press_module
from sweeps.publishing.export import NoReport
from sweeps.publishing.report_worker import ReportWorker
from tests.time_limits import Deadline, scaled
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.metrics_file import Row

COMMAND = "sweeps.publishing.report_worker"


def _presses(process: psutil.Process | None = None) -> list[psutil.Process]:
    children = (process or psutil.Process()).children()
    return [child for child in children if COMMAND in child.cmdline()]


def _the_press() -> psutil.Process:
    """The one that runs, which has its command line a moment after its beginning."""
    deadline = Deadline(10)
    while not (found := _presses()) and not deadline.passed:
        time.sleep(0.01)
    (process,) = found
    return process


def _ended(process: psutil.Process, within: float = 20.0) -> bool:
    return not psutil.wait_procs([process], timeout=scaled(within))[1]


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    made = MadeSweep(tmp_path)
    for level in range(5):
        number = made.add("complete", 1.0 + level)
        made.log(number, Row(1, 0, {"val/loss": 1.0 + level, "epoch": 1.0}))
    return made


def _no_other(*_: object) -> Path:
    raise AssertionError("another process was started")


def test_worker_starts_in_last_quarter_and_writes_report(
    sweep: MadeSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.publishing.export.draw_report", _no_other)
    monkeypatch.setattr(press_module, "_STARVED", 0.0)  # however busy the machine that tests
    with ReportWorker(left=8, at_once=1) as press:
        for _ in range(5):
            press.trial_ended()
        assert not _presses()
        for _ in range(3):
            press.trial_ended()
        process = _the_press()
        target = press.write(sweep.paths, tmp_path / "report.html")
        assert _ended(process)
    page = target.read_text()
    assert "5 of 5 trials" in page
    assert page.count("plotly-graph-div") > 4
    assert not _presses()


def test_concurrent_trials_count_as_near_the_end() -> None:
    with ReportWorker(left=4, at_once=3) as press:
        press.trial_ended()
        process = _the_press()
    assert _ended(process)


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
def test_only_preparation_runs_at_idle_priority() -> None:
    with ReportWorker(left=2, at_once=1) as press:
        press.trial_ended()
        process = _the_press()
        deadline = Deadline(30)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        while (found := _priorities(process)[:2]) != [own, 19] and not deadline.passed:
            time.sleep(0.01)
    assert found == [own, 19]


def _priorities(process: psutil.Process) -> list[int]:
    """The niceness of each thread, the oldest first."""
    threads = sorted(one.id for one in process.threads())
    return [os.getpriority(os.PRIO_PROCESS, one) for one in threads]


def test_starved_worker_is_replaced(
    sweep: MadeSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(press_module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(press_module, "_cpu_seconds", lambda _: 0.0)
    drawn: list[Path] = []
    monkeypatch.setattr(
        "sweeps.publishing.export.draw_report", lambda _, target: drawn.append(target) or target
    )
    with ReportWorker(left=1, at_once=1) as press:
        press.trial_ended()
        process = _the_press()
        press.write(sweep.paths, tmp_path / "report.html")
        assert _ended(process)
    assert drawn == [tmp_path / "report.html"]


def test_worker_killed_while_waiting_is_replaced(
    sweep: MadeSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for want of memory."""
    drawn: list[Path] = []
    monkeypatch.setattr(
        "sweeps.publishing.export.draw_report", lambda _, target: drawn.append(target) or target
    )
    ready = press_module._is_ready

    def ready_and_killed(process: subprocess.Popen[str]) -> bool:
        was = ready(process)
        process.kill()
        process.wait()
        return was

    monkeypatch.setattr(press_module, "_STARVED", 0.0)
    monkeypatch.setattr(press_module, "_is_ready", ready_and_killed)
    with ReportWorker(left=1, at_once=1) as press:
        press.trial_ended()
        press.write(sweep.paths, tmp_path / "report.html")
    assert drawn == [tmp_path / "report.html"]


def test_write_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweeps.publishing.export.draw_report", _no_other)
    monkeypatch.setattr(press_module, "_STARVED", 0.0)
    with ReportWorker(left=1, at_once=1) as press:
        press.trial_ended()
        with pytest.raises(NoReport, match="gone"):
            press.write(SweepPaths(tmp_path, "gone"), tmp_path / "report.html")


def test_worker_ends_with_a_killed_driver() -> None:
    script = (
        "import sys, time\n"
        "from sweeps.publishing.report_worker import ReportWorker\n"
        "ReportWorker(left=1, at_once=1).trial_ended()\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"started\n"
        (process,) = _presses(psutil.Process(driver.pid))
        driver.kill()
        assert _ended(process)
