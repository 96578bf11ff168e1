"""Cases of `tests/cases` about imports and search spaces: `sweep check`, `train` and `run` give
the same answer.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sweeps.errors import SpecError
from sweeps.spec.spec import load_with_positions
from tests.integration.commandline import CommandLine
from tests.slices import sliced

CASES = Path(__file__).parents[1] / "cases"
COMMANDS = ("check", "train", "run")

TASK = """
import torch
from torch import nn
from trainable import Data, Task

class Net(Task):
    def build_model(self):
        return nn.Linear(8, 2)

    def build_data(self):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        y = (x.sum(1) > 0).long()
        return Data(train=(x[:32], y[:32]), val=(x[32:], y[32:]))
"""
SPEC = """
name: names
task: net:Net
metric: val/loss
mode: min
trials: 1
budget: {epochs: 1}
space:
  train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}
train: {batch_size: 32}
"""


def _take(cli: CommandLine, case: str) -> None:
    shutil.copytree(CASES / case, cli.directory, dirs_exist_ok=True)


def _refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "usage:" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.chaos
def test_04_parser_at_import_sees_no_arguments(cli: CommandLine) -> None:
    _take(cli, "04-argparse-at-import")
    for command in COMMANDS:
        cli.ok(command, "sweep.yaml")


def test_04_required_options_are_refused_alike(cli: CommandLine) -> None:
    _take(cli, "04-argparse-at-import")
    told = {_refused(cli(command, "required.yaml")) for command in COMMANDS}
    assert len(told) == 1
    assert "required: --data" in told.pop()
    assert not cli.root.exists()


def test_19_shadowing_module_name_is_refused(cli: CommandLine) -> None:
    _take(cli, "19-module-names")
    message = _refused(cli("check", "s.yaml"))
    assert "the name 'sweeps' is taken" in message
    assert f"{cli.directory}/sweeps.py" in message
    assert not cli.root.exists()


@pytest.mark.parametrize(
    ("place", "command"),
    sliced([("import", "check"), ("build_data", "train")], ("import", "check").__eq__),
)
def test_task_that_exits_is_refused(cli: CommandLine, place: str, command: str) -> None:
    ending = "raise SystemExit(7)"
    if place == "import":
        text = f"{TASK}\n{ending}\n"
    else:
        text = TASK.replace(f"def {place}(self):", f"def {place}(self):\n        {ending}")
    cli.write("net.py", text)
    cli.write("s.yaml", SPEC)
    assert "ended its process (SystemExit: 7)" in _refused(cli(command, "s.yaml"))


def test_08_space_is_valid() -> None:
    """Without a process: every command reads the spec in this way."""
    for file in ("step", "lists", "logstep", "cond", "sci"):
        spec = load_with_positions(CASES / f"08-wandb-space/{file}.yaml")[0]
        for number in range(4):
            spec.trial_config(number, spec.search_space().draw(number) or {})


def test_08_error_lists_alternatives() -> None:
    for file, told in (
        ("boolint", "0 equals option 2; options differ; remove one of them"),
        ("floats", "0.1 equals option 3; options differ; remove one of them"),
        ("nulls", "false equals option 3; options differ; remove one of them"),
        ("opt", "did you mean 'sgd'?"),
        ("qbatch", "write {int: [32, 256], step: 8}"),
    ):
        with pytest.raises(SpecError) as refused:
            load_with_positions(CASES / f"08-wandb-space/{file}.yaml")
        assert str(refused.value).endswith(told)


@pytest.mark.chaos
def test_08_number_without_a_point_is_suggested(cli: CommandLine) -> None:
    _take(cli, "08-wandb-space")
    assert _refused(cli("check", "qwidth.yaml")).endswith(
        "fc_layer_size is 16.0: a whole number is written without a point, and searched with "
        "{int: [low, high], step: n}"
    )
