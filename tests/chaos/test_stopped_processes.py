"""Row 28: processes are stopped (SIGSTOP) and continue later."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.chaos.invariants import SERIAL, References, Sandbox, assert_all, assert_ended

SHORT, LONG = 4.0, 120.0


def _stand_still(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def _stop_each_in_turn(sandbox: Sandbox, references: References, seconds: float) -> None:
    place = sandbox.probe.hold("backward", 7)
    driver = sandbox.run()
    worker = driver.until_held(place)
    os.kill(worker, signal.SIGSTOP)
    sandbox.probe.release(place)
    _stand_still([worker], seconds)
    # The driver while its trial goes on; then all of them, as by a suspended machine.
    place = sandbox.probe.further("backward", 12)
    driver.until_held(place)
    os.kill(driver.pid, signal.SIGSTOP)
    sandbox.probe.release(place)
    _stand_still([driver.pid], seconds)
    place = sandbox.probe.further("forward", 12)
    driver.until_held(place)
    sandbox.probe.release(place)
    _stand_still([driver.pid, *(p.pid for p in sandbox.processes())], seconds)
    assert_all(sandbox, references.of(SERIAL), driver.wait())


@pytest.mark.chaos
@pytest.mark.fault(28, "SIGSTOP of a trial, of the driver, of everything; SIGCONT")
def test_row_28_stopped_for_seconds(sandbox: Sandbox, references: References) -> None:
    _stop_each_in_turn(sandbox, references, SHORT)


@pytest.mark.chaos
@pytest.mark.fault(28, "a trial is stopped, its driver is killed, another one takes over")
def test_row_28_stopped_trial_of_a_dead_driver(sandbox: Sandbox, references: References) -> None:
    driver, worker = sandbox.run_to("backward", 17)
    stopped = psutil.Process(worker)
    stopped.suspend()
    driver.kill()
    sandbox.probe.release("backward-17")
    again = sandbox.resume()
    again.until(lambda: again.token)
    again.until(lambda: not stopped.is_running())  # it never gets the chance to write again
    assert_all(sandbox, references.of(SERIAL), again.wait())


@pytest.mark.chaos
@pytest.mark.fault(28, "the same for two minutes")
def test_row_28_stopped_for_minutes(sandbox: Sandbox, references: References) -> None:
    _stop_each_in_turn(sandbox, references, LONG)


@pytest.mark.chaos
@pytest.mark.fault(28, "a driver and its trial wake up after another took over")
def test_row_28_fenced(sandbox: Sandbox, references: References) -> None:
    stale, _ = sandbox.run_to("backward", 47)  # in the third trial, right before a checkpoint
    asleep = sandbox.processes()
    for process in asleep:
        process.suspend()
    # As on a file system that drops the locks of a host it no longer hears of.
    sandbox.paths.lock.unlink()
    place = sandbox.probe.further("backward", 5)
    driver = sandbox.resume()
    driver.until_held(place)
    for process in asleep:
        process.resume()
    sandbox.probe.release("backward-47")
    assert_ended(stale.wait(), 4, "the lock .* was removed or replaced")
    sandbox.probe.release(place)
    found = assert_all(sandbox, references.of(SERIAL), driver.wait())
    assert [trial["attempts"] for trial in found.trials] == [1, 1, 2, 1]
