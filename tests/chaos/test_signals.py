"""Rows 7 to 10: signals to the driver in every phase of its life."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sweeps.engine.process_cleanup import scratch_directory
from tests.chaos.invariants import (
    PARALLEL,
    SERIAL,
    Driver,
    Outcome,
    References,
    Sandbox,
    assert_all,
    assert_no_residue,
    assert_prints_resume_command,
)
from tests.chaos.outcome import read_outcome
from tests.chaos.sandbox import INTERVAL, MICRO_BATCHES
from tests.time_limits import scaled

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
_GRACE = 30.0
_AT_ONCE = 2.0
_SHORT_GRACE, _SLACK = 3.0, 1.0
"""Seconds that row 10 gives a driver, and what a busy machine may take beyond them to start the
threads and processes that end it."""
_EARLY = re.compile(r"interrupted before anything was started")

_SLOW_SAVE = '''
"""The probe's task, whose state takes long to be copied when a test wants it to."""

import contextlib
import os
import time
from pathlib import Path

from torch import nn

import probe_task


class _Slow(nn.Module):
    def get_extra_state(self):
        directory = Path(os.environ[probe_task.VARIABLE])
        (directory / "saves").touch()
        while (directory / "slow").exists():
            time.sleep(0.01)
        return {}

    def set_extra_state(self, state):
        pass


class Probe(probe_task.Probe):
    def build_model(self):
        model = super().build_model()
        model.add_module("slow", _Slow())
        model.slow.forward = lambda x: x
        return model
'''


def _wait(driver: Driver, condition: Callable[[], object]) -> None:
    driver.until(condition, seconds=120)


def _has(driver: Driver, is_it: Callable[[psutil.Process], bool]) -> bool:
    children = psutil.Process(driver.pid).children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended meanwhile: asked again
        return any(map(is_it, children))
    return False


def _in_preflight(driver: Driver) -> bool:
    return _has(driver, lambda child: "trainable.check.inspect_task" in " ".join(child.cmdline()))


def _starting_ray(driver: Driver) -> bool:
    return driver.token is not None and scratch_directory(driver.token).exists()


def _raylet_runs(driver: Driver) -> bool:
    return _has(driver, lambda child: "raylet" in child.name())


def _no_more_trials(driver: Driver) -> bool:
    return "(4/4 trials)" in driver.text


@pytest.mark.fault(7, "Ctrl-C in the middle of a step, at the keyboard: to the whole group")
def test_row_07_ctrl_c(sandbox: Sandbox, references: References) -> None:
    _saves_at_the_step_it_is_at(sandbox, references.of(SERIAL), signal.SIGINT)


@pytest.mark.chaos
@pytest.mark.fault(7, "Ctrl-C to a pipeline whose reader has gone: sweep run 2>&1 | head -n 1")
def test_row_07_ctrl_c_unread(sandbox: Sandbox, references: References) -> None:
    """What a driver says in its pipeline's end, it says to nobody: to `tee`, too, which the same
    Ctrl-C ends.
    """
    pipe = sandbox.directory / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["head", "-n", "1", pipe], stdout=subprocess.DEVNULL)
    sandbox.cli.within = ("sh", "-c", 'exec "$@" >"$0" 2>&1', str(pipe))
    driver, _ = sandbox.run_to("backward", 38)
    sandbox.cli.within = ()
    assert reader.wait(10) == 0
    pipe.unlink()
    driver.send(signal.SIGINT)
    _wait(driver, sandbox.paths.drain.exists)
    sandbox.probe.release("backward-38")
    assert driver.wait(_GRACE + _AT_ONCE).code == 130
    _goes_on_where_it_was(sandbox, references.of(SERIAL))


def _saves_at_the_step_it_is_at(
    sandbox: Sandbox, reference: Outcome, number: signal.Signals, *, longer: float = 0.0
) -> None:
    """Signal in the second trial's fourth step, which takes some seconds longer, and go on: what
    comes from the terminal goes to the whole group.
    """
    driver, _ = sandbox.run_to("backward", 38)
    (os.kill if number == signal.SIGTERM else os.killpg)(driver.pid, number)
    started = time.monotonic()
    _wait(driver, sandbox.paths.drain.exists)
    time.sleep(longer)
    sandbox.probe.release("backward-38")
    ended = driver.wait()
    assert_prints_resume_command(ended, _CODES[number], "stopping: trials save at their next step")
    assert time.monotonic() - started < scaled(_GRACE)
    _goes_on_where_it_was(sandbox, reference)


def _goes_on_where_it_was(sandbox: Sandbox, reference: Outcome) -> None:
    assert_no_residue(sandbox)
    newest = sandbox.cli.json("trials", "chaos")[1]["checkpoint"]
    assert newest.endswith("00000004"), f"not saved at the step it was at: {newest}"
    found = assert_all(sandbox, reference, sandbox.resume_to_end())
    # Before each start a look at the task takes forward passes of its own.
    trained = [
        {kind: n for kind, n in one.passes.items() if kind != "forward"}
        for one in (found, reference)
    ]
    assert trained[0] == trained[1], "what was saved was trained again"


@pytest.mark.chaos
@pytest.mark.fault(8, "Ctrl-C twice, where no trial comes to its next step")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_row_08_twice(sandbox: Sandbox, references: References, second: signal.Signals) -> None:
    driver, _ = sandbox.run_to("backward", 38)
    driver.send(signal.SIGINT)
    _wait(driver, sandbox.paths.drain.exists)
    started = time.monotonic()
    driver.send(second)
    ended = driver.wait(20)
    assert time.monotonic() - started < scaled(_AT_ONCE)
    assert_prints_resume_command(ended, 130, "exited immediately; what was saved is complete")
    assert_no_residue(sandbox)
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(9, "SIGTERM in the middle of a step: saved at its end, and nothing done again")
def test_row_09_sigterm_in_a_step(sandbox: Sandbox, references: References) -> None:
    # Ray's library would end the process after 3.
    _saves_at_the_step_it_is_at(sandbox, references.of(SERIAL), signal.SIGTERM, longer=5.0)


@pytest.mark.chaos
@pytest.mark.fault(9, "SIGTERM while two trials are trained")
@pytest.mark.parametrize("sandbox", [PARALLEL], indirect=True, ids=["parallel"])
def test_row_09_sigterm(sandbox: Sandbox, references: References) -> None:
    sandbox.probe.pace(0.02)
    driver = sandbox.run()
    _wait(driver, lambda: sandbox.probe.count("backward") > 20)
    driver.send(signal.SIGTERM)
    ended = driver.wait(_GRACE + _AT_ONCE)
    assert_prints_resume_command(ended, 143)
    assert_no_residue(sandbox)
    sandbox.probe.pace(0)
    found = assert_all(sandbox, references.of(PARALLEL), sandbox.resume_to_end())
    again = found.passes["backward"] - references.of(PARALLEL).passes["backward"]
    assert again == 0, f"{again} passes were done again: not saved at the steps they were at"


@pytest.fixture
def hang_up() -> Iterator[None]:
    """Whatever the tests were started with: `nohup` is inherited."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.chaos
@pytest.mark.usefixtures("hang_up")
@pytest.mark.fault(9, "the terminal is closed on a sweep that it shows")
def test_row_09_terminal_closed(sandbox: Sandbox, references: References) -> None:
    screen, terminal = os.openpty()
    viewer = subprocess.Popen(["cat"], stdin=screen, stdout=subprocess.DEVNULL)
    os.close(screen)
    # The leader of a session gets the terminal that it opens.
    sandbox.cli.within = ("sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(terminal))
    driver, _ = sandbox.run_to("backward", 38)
    sandbox.cli.within = ()
    os.close(terminal)
    viewer.kill()
    viewer.wait()
    _wait(driver, sandbox.paths.drain.exists)
    sandbox.probe.release("backward-38")
    assert driver.wait(_GRACE + _AT_ONCE).code == 129
    _goes_on_where_it_was(sandbox, references.of(SERIAL))


@pytest.mark.chaos
@pytest.mark.usefixtures("hang_up")
@pytest.mark.fault(9, "SIGHUP to the sweep and all of its group, as a shell sends it that ends")
def test_row_09_sighup(sandbox: Sandbox, references: References) -> None:
    _saves_at_the_step_it_is_at(sandbox, references.of(SERIAL), signal.SIGHUP)


@pytest.mark.chaos
@pytest.mark.fault(10, "SIGTERM with 3 s of grace, while a state takes longer to be saved")
def test_row_10_grace_shorter_than_a_save(tmp_path: Path) -> None:
    """Measured is the time from the signal to the end of the driver's process, while the save
    that has begun never ends by itself.
    """
    spec = SERIAL.replace("probe_task:", "slow_task:").replace("trials: 4", "trials: 1")
    sandboxes = [Sandbox(tmp_path / name, spec) for name in ("reference", "sweep")]
    try:
        for sandbox in sandboxes:
            sandbox.cli.write("slow_task.py", _SLOW_SAVE)
        assert sandboxes[0].run().wait().code == 0
        sandbox, reference = sandboxes[1], read_outcome(sandboxes[0])
        place = sandbox.probe.hold("forward", 2 * MICRO_BATCHES * INTERVAL)
        driver = sandbox.run("--grace", f"{_SHORT_GRACE:g}s")
        driver.until_held(place)
        driver.until(lambda: _newest(sandbox) == INTERVAL)
        slow, saves = sandbox.probe.directory / "slow", sandbox.probe.directory / "saves"
        slow.touch()
        saves.unlink()
        sandbox.probe.release(place)
        driver.until(saves.exists)
        started = time.monotonic()
        driver.send(signal.SIGTERM)
        ended = driver.wait(20)
        assert time.monotonic() - started < _SHORT_GRACE + scaled(_SLACK)
        assert_prints_resume_command(ended, 143)
        assert _newest(sandbox) == INTERVAL
        assert_no_residue(sandbox)
        slow.unlink()
        assert_all(sandbox, reference, sandbox.resume_to_end())
    finally:
        for sandbox in sandboxes:
            sandbox.close()


def _newest(sandbox: Sandbox) -> int:
    """How many steps the first trial's newest checkpoint holds; 0 without one."""
    found = sorted((sandbox.paths.trial(0) / "checkpoints").glob("step-*"))
    return int(found[-1].name.partition("-")[2]) if found else 0


@pytest.mark.chaos
@pytest.mark.fault(7, "signals while the task is loaded, Ray starts, results are delivered")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.parametrize(
    "phase",
    [_in_preflight, _starting_ray, _raylet_runs, _no_more_trials],
    ids=lambda p: p.__name__,
)
def test_row_07_phases(
    sandbox: Sandbox,
    references: References,
    phase: Callable[[Driver], bool],
    number: signal.Signals,
) -> None:
    driver = sandbox.run()
    _wait(driver, lambda: driver.running and phase(driver))
    driver.send(number)
    ended = driver.wait(_GRACE + _AT_ONCE)
    if sandbox.paths.exists():
        assert_prints_resume_command(ended, _CODES[number])
    else:
        assert ended.code == _CODES[number], ended.text
        assert _EARLY.search(ended.text), ended.text
        assert ended.last_line == "sweep run chaos.yaml"
        assert not sandbox.paths.root.exists()
    assert_no_residue(sandbox)
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(8, "two signals while Ray starts")
def test_row_08_twice_while_ray_starts(sandbox: Sandbox, references: References) -> None:
    driver = sandbox.run()
    _wait(driver, lambda: driver.running and _starting_ray(driver))
    driver.send(signal.SIGTERM)
    _wait(driver, sandbox.paths.drain.exists)
    started = time.monotonic()
    driver.send(signal.SIGTERM)
    ended = driver.wait(20)
    assert time.monotonic() - started < scaled(_AT_ONCE)
    assert_prints_resume_command(ended, 143, "exited immediately")
    assert_no_residue(sandbox)
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())
