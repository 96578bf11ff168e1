"""Cases of `tests/cases` about what is known of a task before it trains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.commandline import CommandLine

CASES = Path(__file__).parents[1] / "cases"


def test_case_23_check_calls_methods_in_the_order_of_a_run(cli: CommandLine) -> None:
    shutil.copytree(CASES / "23-plateau", cli.directory, dirs_exist_ok=True)
    done = cli("check", "sweep.yaml", "-s", "search.try_first=[]")
    assert done.returncode == 0
    assert "AttributeError" not in done.stdout + done.stderr
    assert "s an epoch" in done.stdout
    assert "unknown" not in done.stdout


def test_case_31_parameters_that_no_optimizer_has_are_refused(cli: CommandLine) -> None:
    shutil.copytree(CASES / "31-loss-parameters-on-task", cli.directory, dirs_exist_ok=True)
    done = cli("check", "sweep.yaml")
    assert done.returncode == 2
    assert "self.center.w" in done.stderr
    assert "self.center.c" in done.stderr
    assert "in no optimizer" in done.stderr
    assert not cli.root.exists()
    line = done.stderr.partition("write `")[2].partition("`")[0]
    task = cli.directory / "t.py"
    task.write_text(f"{task.read_text()}    {line}\n")
    assert "is valid" in cli.ok("check", "sweep.yaml")


TASK = """
import torch
from torch import nn
from trainable import Data, Task

class Own(Task):
    def build_model(self):
        return nn.Linear(4, 2)

    def build_data(self):
        x = torch.arange(96.0).view(24, 4).sin()
        split = x, (x.sum(1) > 0).long()
        return Data(train=split, val=split)

    def {method}:
        return super().loss(model, batch)

def run(context, config):
    for epoch in context.remaining_epochs():
        yield {{"val/loss": 1.0}}
"""
SPEC = """
name: own
task: own:{name}
metric: val/loss
mode: min
trials: 2
budget: {{epochs: 1}}
"""


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("name", "method", "written"),
    [  # each method: tests/unit/trainable/test_calls.py
        ("Own", "loss(self, model)", "`def loss(self, model, batch):`"),
        ("run", "loss(self, model, batch)", "`def run(config, context):`"),
    ],
)
def test_signature_that_a_run_cannot_call_is_refused(
    cli: CommandLine, name: str, method: str, written: str
) -> None:
    (cli.directory / "own.py").write_text(TASK.format(method=method))
    (cli.directory / "sweep.yaml").write_text(SPEC.format(name=name))
    for command in ("check", "run", "train"):
        done = cli(command, "sweep.yaml")
        assert done.returncode == 2
        assert written in " ".join(done.stderr.split())
    assert not cli.root.exists()
