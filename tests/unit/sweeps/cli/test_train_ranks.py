"""`sweep train` with several ranks: the curve of one process, and what it says of a lost rank."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.cli.train import train_once
from sweeps.spec.spec import parse_spec
from tests.message_parts import assert_parts
from trainable.store.metrics_file import read_rows

SPEC = """
name: ranked
task: {task}
metric: val/loss
mode: min
trials: 1
budget: {{epochs: 1}}
resources: {{workers: {workers}, gpu: 0}}
train: {{batch_size: 30}}
"""
TASKS = """
import os
import signal

import torch.distributed as dist

from trainable.tasks.spiral import Spiral


class Small(Spiral):
    def __init__(self):
        super().__init__(samples=40)


class Dies(Small):
    def loss(self, model, batch):
        if dist.is_initialized() and dist.get_rank() == 1:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)

"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of tasks of which one dies on the second rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    (tmp_path / "ranked_tasks.py").write_text(TASKS)
    return "ranked_tasks"


@pytest.mark.integration
def test_two_ranks_have_the_curve_of_one_process(module: str, tmp_path: Path) -> None:
    curves = {}
    for workers in (1, 2):
        spec = parse_spec(SPEC.format(task=f"{module}:Small", workers=workers), "one.yaml")
        directory = tmp_path / str(workers)
        quiet = Console(file=io.StringIO())
        train_once(spec, directory, quiet, quiet)
        curves[workers] = [
            {key: row.metrics[key] for key in ("train/loss", "train/grad_norm")}
            for row in read_rows(directory)
        ]
    assert len(curves[1]) == 4
    for one, two in zip(curves[1], curves[2], strict=True):
        assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.integration
def test_a_rank_that_ends_is_named(module: str, tmp_path: Path) -> None:
    file = tmp_path / "ranked.yaml"
    file.write_text(SPEC.format(task=f"{module}:Dies", workers=2))
    result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code == 3, result.output
    assert_parts(result.output, "last words", "rank 1: its process ended (signal SIGKILL)")
