"""Run the command line as a user does: in a real process and its own directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.engine.process_cleanup import find_orphans
from sweeps.sweep_lock import read_holder
from tests.integration.hung_command import end_hung_command
from tests.time_limits import Deadline, scaled

SWEEP = Path(sys.executable).with_name("sweep")
LOOKING = ("status", "trials", "show", "best", "compare", "list")
"""As processes they run in `test_module_shadowing.py` and `test_user_tasks.py`."""

SMALL = """
name: small
task: {name: digits, model: mlp, width: 32}
metric: val/loss
mode: min
trials: 4
seed: 7
budget: {epochs: 4}
space:
  train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}
  train.schedule.warmup: {uniform: [0.0, 0.3]}
  train.clip.max_norm: {loguniform: [0.1, 10]}
search: {sampler: tpe, startup_trials: 2}
early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 2}
"""
TINY = re.sub("early_stopping: .*", "early_stopping: {scheduler: none}", SMALL)
TINY = TINY.replace("trials: 4", "trials: 2\nconcurrency: 1").replace("epochs: 4", "epochs: 1")


class CommandLine:
    """Runs `sweep` in one directory, with its root there too."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / "runs"
        self.project = Path(__file__).parents[2]
        self.environment = {
            k: v for k, v in os.environ.items() if k not in ("SWEEP_ROOT", "PYTHONPATH")
        }
        self.environment["PATH"] = f"{SWEEP.parent}{os.pathsep}{os.environ['PATH']}"
        self.within: tuple[str, ...] = ()
        """What precedes every command in the background, such as what moves it elsewhere."""
        self._started: list[subprocess.Popen[Any]] = []

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    def __call__(self, *arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; fail with its stacks and logs when it does not come."""
        command = [str(SWEEP), *arguments]
        with subprocess.Popen(
            command,
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=(limit := scaled(timeout)))
            except subprocess.TimeoutExpired:
                found = end_hung_command(process, self.root)
                pytest.fail(f"{command} took longer than {limit:g} s\n{found}", pytrace=False)
            except BaseException:  # also on an interruption: leave no process; raised again
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def ok(self, *arguments: str) -> str:
        """Run a command that must succeed; returns what it printed."""
        done = self(*arguments)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """Run a command with --json; in this process if it only looks at the ledger."""
        if arguments[0] not in LOOKING or "--register" in arguments:
            return json.loads(self.ok(*arguments, "--json"))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.directory)
            done = CliRunner(env=self.environment).invoke(app, [*arguments, "--json"])
        assert done.exit_code == 0, f"exit {done.exit_code}\n{done.output}\n{done.exception!r}"
        return json.loads(done.stdout)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command in the background; it is ended with the test."""
        process: subprocess.Popen[str] = self.popen(*arguments, stdout=subprocess.PIPE, text=True)
        return process

    def popen(self, *arguments: str, stdout: int | IO[bytes], text: bool = False) -> Any:
        """Start a command that prints to `stdout`; it is ended with the test."""
        process = subprocess.Popen(
            [*self.within, SWEEP, *arguments],
            cwd=self.directory,
            env=self.environment,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=text,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def token(self, name: str) -> str:
        """The token of the driver that holds a sweep."""
        holder = read_holder(self.root / name / "lock")
        assert holder is not None
        return holder.token

    def end_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def wait_until(
    condition: Callable[[], object], *, seconds: float = 120, every: float = 0.2
) -> None:
    """Wait for something that another process brings about; fail when it does not come."""
    deadline = Deadline(seconds)
    while not condition():
        assert not deadline.passed, f"not reached within {deadline}"
        time.sleep(every)


def no_process_of(token: str) -> bool:
    """Whether nothing that a driver started is left."""
    return not [p for p in find_orphans(token) if p.status() != psutil.STATUS_ZOMBIE]
