"""`sweep check`: what it shows, in a terminal and as JSON, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.engine import fork_server
from sweeps.engine.task_check import TaskInspector
from sweeps.spec.spec import parse_spec

SPEC = """\
name: small
task: {name: "lines:Lines", width: 8}
metric: val/loss
mode: min
trials: 6
budget: {epochs: 9}
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
  task.width: {choice: [8, 16]}
early_stopping: {scheduler: asha, reduction: 3}
"""
TASK = """
import torch
from torch import nn
from trainable import Data, Task


class Lines(Task):
    def __init__(self, *, width):
        self.width = width

    def build_model(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.Linear(self.width, 2))

    def build_data(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return Data(train=(x, (x[:, 0] > 0).long()), val=(x, (x[:, 0] > 0).long()))


class Mean(Lines):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


class MeanOfOne(Lines):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]), 1


class SumOfOne(Lines):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), 1


class Bare(Lines):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def loop(config, context):
    raise AssertionError("a loop is not computed before a sweep")
    yield {}
"""


@pytest.fixture(scope="module", autouse=True)
def _forked_children() -> Iterator[None]:
    """The processes that compute the task are forks, as while a sweep runs: torch is imported."""
    with fork_server.serving(threads=1):
        yield


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `sweep check` in a directory with a spec and its task."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lines.py").write_text(TASK)
    (tmp_path / "s.yaml").write_text(SPEC)

    def run(*settings: str, options: tuple[str, ...] = ()) -> Result:
        overrides = [word for setting in settings for word in ("-s", setting)]
        done = CliRunner().invoke(app, ["check", "s.yaml", *overrides, *options])
        assert {path.name for path in tmp_path.iterdir()} <= {"lines.py", "s.yaml", "__pycache__"}
        return done

    return run


def test_json_has_the_numbers_of_the_text(check: Callable[..., Result]) -> None:
    done = check(options=("--json",))
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert "imports lines" in done.stderr
    plan = found["plan"]
    assert plan["rungs"] == [1, 3]
    assert (plan["trials"], plan["epochs"], plan["max_epochs"]) == (6, 9, 54)
    assert 6 + 2 * 2 + 1 * 6 < plan["expected_epochs"] < 54
    assert plan["simulation"]["repeats"] > 0
    assert plan["epoch_seconds"] > 0
    assert plan["hours"] == pytest.approx(plan["seconds"] / 3600)
    assert plan["disk_bytes"] == 6 * plan["checkpoints_kept"] * plan["checkpoint_bytes"]
    assert plan["measured_with"] == {"task.width": 8}
    assert found["task"]["num_parameters"] == 4 * 8 + 8 + 8 * 2 + 2
    assert found["warnings"] == []
    shown = check()
    assert "  trials    6 of 9 epochs each: at most 54 epochs\n" in shown.stdout
    assert f"at epochs 1, 3: about {plan['expected_epochs']:.0f} epochs" in shown.stdout


PRIORS = (
    "space={train.optimizer.lr: {loguniform: [1.0e-4, 1.0]}, train.optimizer.name: {choice: "
    "[sgd, adamw]}, train.optimizer.momentum: {uniform: [0.0, 0.99], prior: 0.5, prior_width: "
    "0.02, when: {train.optimizer.name: sgd}}, train.optimizer.betas: {choice: [[0.9, 0.999], "
    "[0.8, 0.9]], when: {train.optimizer.name: adamw}}}"
)


def test_priors_are_named_with_their_source(check: Callable[..., Result]) -> None:
    def found(*settings: str) -> list[list[object]]:
        shown = json.loads(check(PRIORS, *settings, options=("--json",)).stdout)["priors"]
        return [list(prior.values()) for prior in shown]

    written = ["train.optimizer.momentum", 0.5, 0.02, None]
    assert found() == [written]
    assert found("search.priors=defaults") == [
        ["train.optimizer.lr", 0.1, 0.25, "sgd"],
        ["train.optimizer.lr", 3e-4, 0.25, "adamw"],
        written,
        ["train.optimizer.betas", [0.9, 0.999], 0.25, "adamw"],
    ]
    text = check(PRIORS, "search.priors=defaults").stdout
    assert "  priors    train.optimizer.lr 0.1 (default of sgd, width 0.25)" in text
    assert "train.optimizer.momentum 0.5 (width 0.02)" in " ".join(text.split())
    assert "priors" not in check().stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["metric=val/accuracy"], "mode is min for val/accuracy"),
        (["task.name=lines:MeanOfOne"], "loss() seems to return a mean"),
    ],
)
def test_probable_mistakes_are_warned_of(
    check: Callable[..., Result], settings: list[str], said: str
) -> None:
    found = json.loads(check(*settings, options=("--json",)).stdout)
    (warning,) = found["warnings"]
    assert warning.startswith(said)


def test_thorough_check_refuses_what_is_else_warned_of(check: Callable[..., Result]) -> None:
    assert check("task.name=lines:SumOfOne").exit_code == 0
    done = check("task.name=lines:SumOfOne", options=("--thorough",))
    assert done.exit_code == 2
    assert "Lines breaks the contract of a task" in done.stderr.replace("SumOfOne", "Lines")


def test_mean_loss_of_a_begun_sweep_is_only_warned_of(check: Callable[..., Result]) -> None:
    assert check("task.name=lines:Mean").exit_code == 2
    spec = parse_spec(SPEC.replace("lines:Lines", "lines:Mean"), "s.yaml")
    (caution,) = TaskInspector(spec, None, resumed=True).facts().checked
    assert caution.startswith("loss() seems to return a mean")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["metric=val/acc"], "metric: 'val/acc' is not reported (did you mean 'val/accuracy'?)"),
        (["task.name=lines:Bare"], "task: loss() returned Tensor; return the sum of the losses"),
        (["task.name=lines:Mean"], "task: loss() seems to return a mean"),
    ],
)
def test_certain_mistakes_are_refused(
    check: Callable[..., Result], settings: list[str], said: str
) -> None:
    done = check(*settings)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "is valid" not in done.stdout


def test_custom_loop_is_not_computed(check: Callable[..., Result]) -> None:
    found = json.loads(check("task={name: 'lines:loop'}", "space={}", options=("--json",)).stdout)
    assert found["task"]["own_loop"]
    assert found["plan"]["hours"] is None
