"""One sweep in its own directory, its drivers, and their output.

Everything goes through the real command line. What must not live here: what must be true after a
fault (see `invariants.py`), or faults themselves.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from sweeps.engine.process_cleanup import find_orphans, kill_children, scratch_directory
from sweeps.paths import SweepPaths
from sweeps.sweep_lock import read_holder
from tests.chaos import probe_task
from tests.integration.commandline import CommandLine
from tests.time_limits import Deadline

NAME = "chaos"
PATIENCE = 240.0

_SPEC = """
name: chaos
task: probe_task:Probe
metric: val/loss
mode: min
trials: 4
seed: 7
budget: {epochs: 3}
space:
  train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}
  train.clip.max_norm: {loguniform: [0.1, 10]}
train: {batch_size: 24, accumulation: 2, precision: fp16}
checkpoint: {every: 2 steps}
"""
STEPS, MICRO_BATCHES, INTERVAL = 15, 2, 2
"""Optimizer steps of a trial that is not stopped early; forward passes of each; steps from one
checkpoint to the next."""

SERIAL = (
    _SPEC
    + """
concurrency: 1
search: {sampler: tpe, startup_trials: 2}
early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 2}
"""
)
"""One trial after the other: what is suggested and stopped depends on all that came before."""

PARALLEL = (
    _SPEC
    + """
concurrency: 2
search: {sampler: random}
"""
)
"""Two at once: each trial depends on its number alone."""

RANKED = (
    _SPEC.replace("probe_task:Probe", "probe_task:Ranked")
    .replace("trials: 4", "trials: 2")
    .replace("epochs: 3", "epochs: 2")
    + """
concurrency: 1
search: {sampler: random}
resources: {workers: 2, cpu: 1}
"""
)
"""Trials of two ranks each, one trial after the other; both ranks evaluate."""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code; negative, the signal that killed it.
        text: What it printed, errors included.
        seconds: How long it ran.
    """

    code: int
    text: str
    seconds: float

    @property
    def last_line(self) -> str:
        return (self.text.splitlines() or [""])[-1]


class Driver:
    """A started `sweep run` or `sweep resume`."""

    def __init__(self, sandbox: Sandbox, process: subprocess.Popen[bytes], output: Path) -> None:
        self._sandbox = sandbox
        self._process = process
        self._output = output
        self._started = time.monotonic()
        self.pid = process.pid
        self.token: str | None = None
        """Its lock's token, once it holds the sweep."""

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    @property
    def running(self) -> bool:
        holder = read_holder(self._sandbox.paths.lock)
        if holder is not None and holder.pid == self.pid:
            self.token = holder.token
            self._sandbox.tokens.add(holder.token)
        return self._process.poll() is None

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self.running, f"it ended before it could be sent signal {number}:\n{self.text}"
        os.kill(self.pid, number)

    def wait(self, seconds: float = PATIENCE) -> Ended:
        """Wait for its end."""
        self.until(lambda: False, seconds=seconds, unless_ended=False)
        return Ended(self._process.wait(), self.text, time.monotonic() - self._started)

    def kill(self) -> Ended:
        """SIGKILL the driver alone; what it started is left to itself."""
        self.send(signal.SIGKILL)
        return self.wait(10)

    def power_off(self) -> Ended:
        """SIGKILL the driver and everything that it started, as when the machine goes off."""
        ended = self.kill()
        if self.token is not None:
            kill_children(self.token)
        return ended

    def until_held(self, place: str) -> int:
        """Wait for a process to be held at a place of the probe; returns its id."""
        probe = self._sandbox.probe
        self.until(lambda: probe.held(place))
        pid = probe.held(place)
        assert pid is not None
        return pid

    def until(
        self,
        condition: Callable[[], object],
        *,
        seconds: float = PATIENCE,
        unless_ended: bool = True,
    ) -> None:
        """Wait for something that the driver brings about, or for its end.

        Args:
            condition: What to wait for.
            seconds: At most this long.
            unless_ended: Whether it is a failure when the driver ends before.
        """
        deadline = Deadline(seconds)
        while not condition():
            running = self.running
            if not running and not condition():
                assert not unless_ended, f"the driver ended too early:\n{self.text}"
                return
            assert not deadline.passed, f"not reached within {deadline}:\n{self.text}"
            time.sleep(0.02)


class ProbeDirectory:
    """The test's side of `probe_task.py`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def count(self, kind: str = "forward") -> int:
        """How many passes of a kind there were, of all trials and attempts."""
        path = self.directory / kind
        return path.stat().st_size if path.exists() else 0

    def hold(self, kind: str, number: int) -> str:
        """Keep the first process whose pass is number `number` of all (or a later one) there.

        Args:
            kind: Of the passes; `backward.1` are those of the ranks 1 alone.
            number: From 1.
        """
        assert kind.partition(".")[0] in (*probe_task.KINDS, probe_task.RESET), kind
        place = f"{kind}-{number}"
        (self.directory / f"hold-{place}").touch()
        return place

    def do(self, deed: str, kind: str, number: int) -> None:
        """Have the first process whose pass is number `number` of all do one of the deeds."""
        assert deed in probe_task.DEEDS, deed
        assert kind.partition(".")[0] in probe_task.KINDS, kind
        (self.directory / f"do-{deed}-{kind}-{number}").touch()

    def rank(self, number: int) -> int:
        """The process of a rank of the trial that trained last."""
        return int((self.directory / f"rank-{number}").read_text())

    def further(self, kind: str, number: int) -> str:
        """Hold at the pass that is `number` after the latest one."""
        return self.hold(kind, self.count(kind) + number)

    def held(self, place: str) -> int | None:
        """The process that is held at a place; None while there is none."""
        found = list(self.directory.glob(f"held-{place}-*"))
        return int(found[0].name.rpartition("-")[2]) if found else None

    def release(self, place: str) -> None:
        """Let the process at a place go on, and hold nobody there who has not come yet."""
        for path in [*self.directory.glob(f"held-{place}-*"), self.directory / f"hold-{place}"]:
            path.unlink(missing_ok=True)

    def pace(self, seconds: float) -> None:
        """Make every pass take at least this long."""
        for path in self.directory.glob("pace-*"):
            path.unlink()
        if seconds:
            (self.directory / f"pace-{seconds}").touch()


class Sandbox:
    """A directory with a spec, the task beside it, a root, and room for what a fault needs.

    Args:
        directory: Made when missing; belongs to the sandbox.
        spec: The sweep's spec; its name is `chaos`.
        environment: Further variables of every command.
        store: The tracking server's database, shared with others; None: the root's own store.
    """

    def __init__(
        self,
        directory: Path,
        spec: str = SERIAL,
        environment: dict[str, str] | None = None,
        *,
        store: str | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.spec = spec
        self.store = store
        self.cli = CommandLine(directory)
        self.paths = SweepPaths(self.cli.root, NAME)
        self.probe = ProbeDirectory(directory / "probe")
        self.cli.environment[probe_task.VARIABLE] = str(self.probe.directory)
        self.cli.environment.update(environment or {})
        self.cli.write("chaos.yaml", spec)
        shutil.copy(probe_task.__file__, directory)
        self.tokens: set[str] = set()
        """Of every driver that was ever seen to hold the sweep."""
        self._num_started = 0

    def start(self, *arguments: str) -> Driver:
        """Start a command in the background."""
        self._num_started += 1
        output = self.directory / f"output-{self._num_started:03d}.txt"
        with output.open("wb") as file:
            process = self.cli.popen(*arguments, stdout=file)
        return Driver(self, process, output)

    def run(self, *arguments: str) -> Driver:
        """Start `sweep run`."""
        return self.start("run", "chaos.yaml", *arguments)

    def resume(self, *arguments: str) -> Driver:
        """Start `sweep resume`."""
        return self.start("resume", NAME, *arguments)

    def resume_to_end(self, *arguments: str) -> Ended:
        """Do what a user does after an interruption, to the sweep's end: resume it, or run it if
        it was interrupted before it existed.
        """
        again = self.resume if self.paths.exists() else self.run
        return again(*arguments).wait()

    def run_to(self, kind: str, number: int, *arguments: str) -> tuple[Driver, int]:
        """Start the sweep and hold it at a pass; returns the driver and the process held there."""
        place = self.probe.hold(kind, number)
        driver = self.run(*arguments)
        return driver, driver.until_held(place)

    def processes(self) -> list[psutil.Process]:
        """The live processes that were started here, or by a driver that was."""
        found = {p.pid: p for token in self.tokens for p in find_orphans(token)}
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.directory):
                    found[process.pid] = process
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue  # gone meanwhile, or someone else's
        return [p for p in found.values() if _is_alive(p)]

    def close(self) -> None:
        """End everything that is left, and remove what drivers left outside of the directory."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.cli.end_all()
        for token in self.tokens:
            kill_children(token)
            shutil.rmtree(scratch_directory(token), ignore_errors=True)


class Template:
    """A sandbox as it was when the power went off, to be had again and again.

    The copies lie in one place, one after the other, because a sweep's files name that place.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._kept = sandbox.directory.with_name(f"{sandbox.directory.name}-kept")
        shutil.copytree(sandbox.directory, self._kept, symlinks=True)

    def fresh(self) -> Sandbox:
        """The sandbox as it was; the previous one that was handed out is gone."""
        self._sandbox.close()
        shutil.rmtree(self._sandbox.directory)
        shutil.copytree(self._kept, self._sandbox.directory, symlinks=True)
        for order in [*self._sandbox.probe.directory.glob("h*ld-*")]:
            order.unlink()
        return self._sandbox


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
