"""Cases of `tests/cases` about imports and search spaces: `sweep check`, `train` and `run` give
the same answer.
"""

from __future__ import annotations

import json
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
    told = {_refused(cli(command, "s.yaml")) for command in COMMANDS}
    assert len(told) == 1
    assert "the name 'sweeps' is taken" in (message := told.pop())
    assert f"{cli.directory}/sweeps.py" in message
    assert not cli.root.exists()


def test_module_named_like_stdlib_affects_only_its_importers(
    cli: CommandLine,
) -> None:
    """The same `sys.argv`, `sys.path` and directory everywhere, and no file beside the task in the
    place of Python's.
    """
    for name in ("logging", "queue", "types", "numpy", "sweeps", "random"):
        cli.write(f"{name}.py", "raise RuntimeError('this is no module of Python')")
    seen = "import json, os, sys\n"
    seen += "path = [p for p in sys.path if not p.endswith('thirdparty_files')]\n"
    seen += "print(json.dumps([sys.argv, path, os.getcwd()]), "
    seen += f"file=open({str(cli.directory / 'seen')!r}, 'a'))\n"
    cli.write("net.py", seen + TASK)
    cli.write("s.yaml", SPEC)
    for command in COMMANDS:
        cli.ok(command, "s.yaml")
    lines = (cli.directory / "seen").read_text().splitlines()
    assert len(lines) >= 3
    assert len({*lines}) == 1
    arguments, path, here = json.loads(lines[0])
    assert (arguments, path[-1], here) == (["sweep"], str(cli.directory), str(cli.directory))

    cli.write("net.py", "import random\n" + TASK)
    told = {_refused(cli(command, "s.yaml")) for command in COMMANDS[:2]}
    assert len(told) == 1
    assert "imports 'random': the name 'random' is taken" in told.pop()


@pytest.mark.parametrize(
    ("place", "command"),
    sliced(
        [
            ("import", "check"),
            ("__init__", "check"),
            ("build_model", "check"),
            ("build_data", "train"),
        ],
        lambda row: row[0] in ("import", "build_data"),
    ),
)
def test_task_that_exits_is_refused(cli: CommandLine, place: str, command: str) -> None:
    ending = "raise SystemExit(7)"
    if place == "import":
        text = f"{TASK}\n{ending}\n"
    elif place == "__init__":
        text = f"{TASK}\n    def __init__(self):\n        {ending}\n"
    else:
        text = TASK.replace(f"def {place}(self):", f"def {place}(self):\n        {ending}")
    cli.write("net.py", text)
    cli.write("s.yaml", SPEC)
    assert "ended its process (SystemExit: 7)" in _refused(cli(command, "s.yaml"))


@pytest.mark.parametrize("file", ["step", "lists", "logstep", "cond", "sci"])
def test_08_space_is_valid(file: str) -> None:
    """Without a process: every command reads the spec in this way."""
    spec = load_with_positions(CASES / f"08-wandb-space/{file}.yaml")[0]
    for number in range(4):
        spec.trial_config(number, spec.search_space().draw(number) or {})


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("boolint", "0 equals option 2; options differ; remove one of them"),
        ("floats", "0.1 equals option 3; options differ; remove one of them"),
        ("nulls", "false equals option 3; options differ; remove one of them"),
        ("opt", "did you mean 'sgd'?"),
        ("qbatch", "write {int: [32, 256], step: 8}"),
    ],
)
def test_08_error_lists_alternatives(file: str, told: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_with_positions(CASES / f"08-wandb-space/{file}.yaml")
    assert str(refused.value).endswith(told)


def test_08_number_without_a_point_is_suggested(cli: CommandLine) -> None:
    _take(cli, "08-wandb-space")
    assert _refused(cli("check", "qwidth.yaml")).endswith(
        "fc_layer_size is 16.0: a whole number is written without a point, and searched with "
        "{int: [low, high], step: n}"
    )


def test_08_lists_and_steps_are_trained_and_shown(cli: CommandLine) -> None:
    _take(cli, "08-wandb-space")
    text = (cli.directory / "lists.yaml").read_text()
    text = text.replace("random}", "grid}").replace("[64, 32], [128], null", "[64, 32], [128]")
    step = "  task.fc_layer_size: {int: [16, 32], step: 16}\n"
    cli.write("lists.yaml", text.replace("space:\n", "space:\n" + step))
    cli.ok("run", "lists.yaml")
    found = [cli.json("show", "lists", str(number))["params"] for number in range(4)]
    points = [[one["task.fc_layer_size"], one["task.layers"]] for one in found]
    assert sorted(points) == [[16, [64, 32]], [16, [128]], [32, [64, 32]], [32, [128]]]
