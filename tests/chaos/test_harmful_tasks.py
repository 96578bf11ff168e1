"""Rows 36 to 39, and 49: tasks that damage their model, their process, or their children."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.chaos.invariants import (
    PARALLEL,
    SERIAL,
    References,
    Sandbox,
    assert_all,
    assert_ended,
)
from tests.chaos.killed_runs import curve
from tests.chaos.probe_task import RESET

GROWING = SERIAL.replace("probe_task:Probe", "probe_task:Growing").replace(
    "trials: 4", "trials: 2"
)
COUNTING = PARALLEL.replace("probe_task:Probe", "probe_task:Counting").replace(
    "concurrency: 2", "concurrency: 1"
)
HANGING = SERIAL + "failures: {step_timeout: 8s, max_retries: 1}\n"
_NOTICED_SECONDS = 60.0
"""The child of row 38 lives for ten minutes."""


@pytest.mark.chaos
@pytest.mark.fault(36, "buffers registered and resized in forward, across kills and a resume")
@pytest.mark.parametrize("sandbox", [GROWING], indirect=True, ids=["growing"])
def test_row_36_buffers_that_grow(sandbox: Sandbox, references: References) -> None:
    driver, worker = sandbox.run_to("forward", 14)
    place = sandbox.probe.further("forward", 8)
    os.kill(worker, signal.SIGKILL)
    sandbox.probe.release("forward-14")
    driver.until_held(place)
    driver.power_off()
    sandbox.probe.release(place)
    found = assert_all(sandbox, references.of(GROWING), sandbox.resume_to_end())
    sizes = [len(state["model"]["0.seen"]) for state in found.states.values()]
    assert min(sizes) > 1, f"buffers were not resized: {sizes}"


@pytest.mark.chaos
@pytest.mark.fault(37, "a directory that is gone; kill -9 between two trials of a process")
def test_row_37_worker_lost_between_two_trials(sandbox: Sandbox, references: References) -> None:
    sandbox.probe.do("leave_directory", "forward", 12)
    sandbox.probe.do("watch_reset", "forward", 40)  # in the second trial
    place = sandbox.probe.hold(RESET, 1)
    driver = sandbox.run()
    worker = driver.until_held(place)
    os.kill(worker, signal.SIGKILL)
    sandbox.probe.release(place)
    found = assert_all(sandbox, references.of(SERIAL), driver.wait())
    assert [trial["attempts"] for trial in found.trials] == [1, 1, 1, 1]


@pytest.mark.chaos
@pytest.mark.fault(38, "kill -9 of a worker that has forked")
def test_row_38_child_of_a_killed_worker(sandbox: Sandbox, references: References) -> None:
    sandbox.probe.do("fork", "forward", 12)
    driver, worker = sandbox.run_to("forward", 14)
    children = psutil.Process(worker).children()
    assert children
    place = sandbox.probe.further("forward", 1)
    os.kill(worker, signal.SIGKILL)
    sandbox.probe.release("forward-14")
    driver.until(lambda: sandbox.probe.held(place), seconds=_NOTICED_SECONDS)
    sandbox.probe.release(place)
    found = assert_all(sandbox, references.of(SERIAL), driver.wait())
    assert [trial["attempts"] for trial in found.trials] == [2, 1, 1, 1]
    assert not any(child.is_running() for child in children)


@pytest.mark.fault(39, "a trial that hangs in a step")
@pytest.mark.parametrize("sandbox", [HANGING], indirect=True, ids=["hanging"])
def test_row_39_hang_is_detected(sandbox: Sandbox, references: References) -> None:
    driver, _ = sandbox.run_to("forward", 14)
    found = assert_all(sandbox, references.of(SERIAL), driver.wait())
    assert [trial["attempts"] for trial in found.trials] == [2, 1, 1, 1]
    assert "in _stay" in (sandbox.paths.trial(0) / "trial.log").read_text(encoding="utf-8")


@pytest.mark.chaos
@pytest.mark.fault(39, "sweep stop --trial of one that hangs beside another")
@pytest.mark.parametrize("sandbox", [PARALLEL], indirect=True, ids=["parallel"])
def test_row_39_hang_is_stopped_by_the_user(sandbox: Sandbox, references: References) -> None:
    driver, worker = sandbox.run_to("forward", 20, "--grace", "3s")
    opened = {file.path for file in psutil.Process(worker).open_files()}
    (hung,) = [n for n in range(4) if str(sandbox.paths.trial(n) / "trial.log") in opened]
    assert_ended(sandbox.start("stop", "chaos", "--trial", str(hung)).wait(), 0)
    others = [n for n in range(4) if n != hung]
    found = assert_all(sandbox, references.of(PARALLEL), driver.wait(), only=others)
    stopped = found.trials[hung]
    assert (stopped["state"], stopped["reason"]) == ("pruned", "stopped by the user")


@pytest.mark.chaos
@pytest.mark.fault(49, "globals that trials change, and kill -9 of the driver")
@pytest.mark.parametrize("sandbox", [COUNTING], indirect=True, ids=["counting"])
def test_row_49_globals_reach_no_other_trial(sandbox: Sandbox, references: References) -> None:
    driver, _ = sandbox.run_to("forward", 72)  # one worker has trained two trials
    driver.kill()
    sandbox.probe.release("forward-72")
    found = assert_all(sandbox, references.of(COUNTING), sandbox.resume_to_end())
    for number, trained in found.curves.items():
        alone = sandbox.directory / f"alone-{number}"
        sandbox.cli.ok("train", "chaos", str(number), "--dir", str(alone))
        assert trained == curve(alone)
        assert trained[0][1]["passes/global"] < trained[-1][1]["passes/global"] <= 30
