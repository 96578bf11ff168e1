"""Modules named like ours, the standard library's or a dependency's in the working directory: no
command imports them.

A sweep is run first, in the same directory and without them. What must not live here: how a task
is imported (`test_cases_env`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.commandline import SWEEP, CommandLine
from tests.slices import sliced
from tests.time_limits import scaled

PLANTED = (
    "mlflow", "sitecustomize", "usercustomize", "sweeps", "trainable", "tracking", "torch", "ray",
    "json", "uvicorn", "alembic", "sqlalchemy", "optuna", "numpy", "plotly", "matplotlib",
    "multiprocessing", "pickle", "encodings", "gunicorn.conf", "signal", "runpy", "safetensors",
)  # fmt: skip
SPEC = """
name: planted
task: task_of_mine:Mine
metric: val/loss
mode: min
trials: 1
budget: {epochs: 1}
space:
  train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}
train: {batch_size: 32}
"""
MODEL = """
from torch import nn

class Line(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 2))
"""
TASK = """
import torch
from model_of_mine import Line
from trainable import Data, Task

class Mine(Task):
    def build_model(self):
        return Line()

    def build_data(self):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        y = (x.sum(1) > 0).long()
        return Data(train=(x[:32], y[:32]), val=(x[32:], y[32:]))
"""
COMMANDS = [
    ["list"],
    ["status", "planted"],
    ["trials", "planted"],
    ["best", "planted"],
    ["best", "planted", "--register", "mine"],
    ["best", "planted", "--register", "pickled", "--pickle"],
    ["best", "planted", "--export", "exported"],
    ["report", "planted"],
    ["compare", "planted"],
    ["check", "planted.yaml"],
    ["train", "planted.yaml"],
    ["sync", "planted"],
    ["resume", "planted", "-s", "trials=2"],
    ["doctor"],
]
PYTHONS_OWN = ("sweeps", "sitecustomize", "signal", "runpy", "encodings")
"""What Python itself looks for on its first path before any of our code runs, which is the working
directory for `-m`, and for an empty entry of PYTHONPATH."""


@pytest.fixture(scope="module")
def planted(module_cli: CommandLine) -> CommandLine:
    cli = module_cli
    cli.write("model_of_mine.py", MODEL)
    cli.write("task_of_mine.py", TASK)
    cli.write("planted.yaml", SPEC)
    cli.ok("run", "planted.yaml")
    for name in PLANTED:
        _plant(cli, name)
    return cli


def _plant(cli: CommandLine, name: str) -> None:
    marker = cli.directory / f"imported-{name}"
    cli.write(f"{name}.py", f"open({str(marker)!r}, 'w').close()\n")


@contextmanager
def _without(cli: CommandLine, *names: str) -> Iterator[None]:
    """Take some of the planted modules away for a while."""
    for name in names:
        (cli.directory / f"{name}.py").unlink()
    try:
        yield
    finally:
        for name in names:
            _plant(cli, name)


def _imported(cli: CommandLine) -> list[str]:
    """Which of the planted modules were imported; their markers are taken away."""
    found = sorted(cli.directory.glob("imported-*"))
    for marker in found:
        marker.unlink()
    return [marker.name.removeprefix("imported-") for marker in found]


@pytest.mark.parametrize(
    "command",
    sliced(COMMANDS, lambda words: words[0] in ("check", "report") or "--pickle" in words),
    ids=" ".join,
)
def test_no_command_imports_from_the_working_directory(
    planted: CommandLine, command: list[str]
) -> None:
    # A task beside a `trainable.py`, or what it imports itself, is refused; see `test_cases_env`.
    trains = command[0] in ("check", "train", "resume")
    with _without(planted, *["trainable", "torch"] * trains):
        done = planted(*command)
    assert _imported(planted) == []
    assert done.returncode in ({0, 1} if command == ["doctor"] else {0}), done.stderr


@pytest.mark.chaos
def test_ui_server_imports_nothing_from_it(planted: CommandLine) -> None:
    process = planted.start("ui", "--port", "0", "--no-open")
    assert process.stdout is not None
    try:
        while "http" not in (line := process.stdout.readline()):
            assert line or _imported(planted) == [], "it ended"
            assert line, "the server ended"
    finally:
        process.terminate()
        process.wait(60)
    assert _imported(planted) == []


def test_relative_entry_for_the_working_directory_is_ignored(planted: CommandLine) -> None:
    """An empty one is what `PYTHONPATH=$PYTHONPATH:/code` leaves where there was none."""
    entries = ("", ".", "./", "nowhere/..", "/nonexistent")
    environment = {**planted.environment, "PYTHONPATH": os.pathsep.join(entries)}
    with _without(planted, *PYTHONS_OWN):
        done = _report(planted, [str(SWEEP)], environment)
    assert _imported(planted) == []
    assert done.returncode == 0, done.stderr


@pytest.mark.chaos
def test_run_as_a_module_it_imports_only_the_standard_path(
    planted: CommandLine,
) -> None:
    with _without(planted, *PYTHONS_OWN):
        done = _report(planted, [sys.executable, "-m", "sweeps.entry"], planted.environment)
    assert _imported(planted) == []
    assert done.returncode == 0, done.stderr


def _report(
    cli: CommandLine, program: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Write a report, which needs a child, and so what this process hands on."""
    return subprocess.run(
        [*program, "report", "planted"],
        cwd=cli.directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(180),
        check=False,
    )
