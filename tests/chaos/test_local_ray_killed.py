"""Row 47: a process of the local Ray is killed or stopped, and Ray itself would wait for it."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests.chaos.invariants import (
    PARALLEL,
    Driver,
    Ended,
    References,
    Sandbox,
    assert_all,
    assert_no_residue,
    assert_prints_resume_command,
)
from tests.time_limits import scaled

pytestmark = pytest.mark.parametrize("sandbox", [PARALLEL], indirect=True, ids=["parallel"])
_GONE = 30.0


def _held(sandbox: Sandbox) -> Driver:
    driver, _ = sandbox.run_to("backward", 16)
    return driver


def _signal(driver: Driver, name: str, number: int = signal.SIGKILL) -> None:
    """Wait for a process of a driver's Ray, and send it a signal."""

    def found() -> list[psutil.Process]:
        return [each for each in psutil.Process(driver.pid).children(True) if _title(each) == name]

    driver.until(found)
    found()[0].send_signal(number)


def _title(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:  # it has ended
        return ""


def _assert_exits(sandbox: Sandbox, driver: Driver, cause: str) -> Ended:
    began = time.monotonic()
    ended = driver.wait()
    seconds = time.monotonic() - began
    print(f"exited {seconds:.1f} s later")
    assert seconds < scaled(_GONE)
    assert_prints_resume_command(ended, 3, f"stopped: Ray is lost: its process {cause}")
    assert_no_residue(sandbox)
    sandbox.probe.release("backward-16")
    return ended


@pytest.mark.chaos
@pytest.mark.fault(47, "kill -9 of raylet while trials run, of gcs_server while Ray starts")
def test_row_47_raylet_and_gcs_server_killed(sandbox: Sandbox, references: References) -> None:
    driver = _held(sandbox)
    _signal(driver, "raylet")
    ended = _assert_exits(sandbox, driver, r"raylet, .* ended by signal 9 \(SIGKILL\)")
    assert "the trial continues" not in ended.text, "a lost Ray counts as a lost worker"
    driver = sandbox.resume()
    _signal(driver, "gcs_server")
    _assert_exits(sandbox, driver, r"gcs_server, .* ended by signal 9 \(SIGKILL\)")
    assert_all(sandbox, references.of(PARALLEL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(47, "kill -9, SIGTERM or SIGSTOP of each of Ray's processes while trials run")
@pytest.mark.parametrize(
    ("name", "number", "cause"),
    [
        ("gcs_server", signal.SIGKILL, "gcs_server, .* ended by signal 9"),
        ("ray::DashboardAgent", signal.SIGKILL, "raylet, .* or an agent of it ended"),
        ("ray::RuntimeEnvAgent", signal.SIGKILL, "raylet, .* or an agent of it ended"),
        ("raylet", signal.SIGTERM, "raylet, .* or an agent of it ended"),
        ("gcs_server", signal.SIGTERM, "gcs_server, .* does not answer"),
        ("raylet", signal.SIGSTOP, "raylet, .* was stopped"),
        ("gcs_server", signal.SIGSTOP, "gcs_server, .* was stopped"),
        ("ray::RuntimeEnvAgent", signal.SIGSTOP, "RuntimeEnvAgent, .* was stopped"),
    ],
)
def test_row_47_process_of_ray_lost(
    sandbox: Sandbox, references: References, name: str, number: int, cause: str
) -> None:
    driver = _held(sandbox)
    _signal(driver, name, number)
    ended = _assert_exits(sandbox, driver, cause)
    assert "the trial continues" not in ended.text, "a lost Ray counts as a lost worker"
    assert_all(sandbox, references.of(PARALLEL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(47, "kill -9 of raylet or gcs_server when the last trial has ended")
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_row_47_killed_at_the_end(sandbox: Sandbox, references: References, name: str) -> None:
    driver = sandbox.run()
    driver.until(lambda: "(4/4 trials)" in driver.text)
    _signal(driver, name)
    ended = driver.wait(scaled(_GONE))
    if ended.code:  # the driver still needed it
        assert_prints_resume_command(ended, 3, f"stopped: Ray is lost: its process {name}")
        ended = sandbox.resume_to_end()
    assert_all(sandbox, references.of(PARALLEL), ended)
