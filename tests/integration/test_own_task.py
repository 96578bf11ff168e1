"""A task from a package outside the project: one that works, and the ways in which one fails."""

from __future__ import annotations

from typing import Any

import pytest
from mlflow import MlflowClient

from tests.integration.commandline import CommandLine

TASK = '''
import torch
from torch import nn
from torch.utils.data import Dataset

from trainable import Data, Task


class Points(Dataset):
    """Somebody's own map-style data set: which side of a line a point lies on."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 3, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.x[i].sum() > 0)


class Net(nn.Module):
    """Somebody's own module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.outer = nn.Linear(8, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Mine(Task):
    def __init__(self, *, behaviour="works"):
        self.behaviour = behaviour

    def build_model(self):
        return Net()

    def build_data(self):
        return Data(train=Points(256, 0), val=Points(64, 1))

    def loss(self, model, batch):
        if self.behaviour == "raises":
            raise ValueError("out of cheese")
        loss, weight = super().loss(model, batch)
        return (loss * float("nan"), weight) if self.behaviour == "diverges" else (loss, weight)
'''
SPEC = """
name: mine
task: {name: "somewhere.else_:Mine"}
metric: val/accuracy
mode: max
trials: 6
concurrency: 1
budget: {epochs: 3}
space:
  train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}
  task.behaviour: {choice: [works, raises, diverges]}
search: {sampler: random}
train: {batch_size: 32}
"""


@pytest.fixture(scope="module")
def trials(module_cli: CommandLine) -> list[dict[str, Any]]:
    """A sweep of that task, run to its end."""
    (module_cli.directory / "somewhere").mkdir()
    module_cli.write("somewhere/else_.py", TASK)
    module_cli.write("mine.yaml", SPEC)
    done = module_cli("run", "mine.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = module_cli.json("trials", "mine")
    assert {trial["params"]["task.behaviour"] for trial in found} == {
        "works",
        "raises",
        "diverges",
    }
    return found


def test_each_trial_ends_as_its_task_behaved(trials: list[dict[str, Any]]) -> None:
    reasons = {
        "raises": "ValueError: out of cheese",
        "diverges": (
            "non_finite: the loss is nan at step 1; no parameter was changed by that step; "
            "lower the learning rate, lengthen the warmup or lower max_norm"
        ),
    }
    for trial in trials:
        behaviour = trial["params"]["task.behaviour"]
        if behaviour == "works":
            assert (trial["state"], trial["epoch"], trial["reason"]) == ("complete", 3, None)
            assert trial["value"] > 0.8
        else:
            assert trial["state"] == "failed"
            assert trial["reason"] == reasons[behaviour]
            assert trial["attempts"] == 1
            assert trial["checkpoint"] is None


def test_show_tells_where_it_was_raised(
    module_cli: CommandLine, trials: list[dict[str, Any]]
) -> None:
    number = next(t["number"] for t in trials if t["params"]["task.behaviour"] == "raises")
    shown = module_cli.ok("show", "mine", str(number))
    assert "else_.py" in shown
    assert "out of cheese" in shown
    log = (module_cli.root / f"mine/trials/{number:04d}/trial.log").read_text()
    assert "out of cheese" in log


def test_failed_runs_are_failed_with_their_reason(
    module_cli: CommandLine, trials: list[dict[str, Any]]
) -> None:
    client = MlflowClient(f"sqlite:///{module_cli.root / 'mlflow.db'}")
    for trial in trials:
        run = client.get_run(trial["mlflow_run_id"])
        if trial["state"] == "failed":
            assert run.info.status == "FAILED"
            assert run.data.tags["reason"] == trial["reason"]
            traceback = run.data.tags["failure.traceback"].rstrip().splitlines()
            assert traceback[0].startswith("Traceback")
            assert trial["reason"].partition(": ")[2] in traceback[-1]
        else:
            assert run.info.status == "FINISHED"


def test_best_of_a_maximised_metric_is_the_largest(
    module_cli: CommandLine, trials: list[dict[str, Any]]
) -> None:
    best = module_cli.json("best", "mine")
    assert best["value"] == max(t["value"] for t in trials if t["state"] == "complete")


def test_when_nothing_succeeds_there_is_no_best(module_cli: CommandLine, trials: object) -> None:
    del trials
    done = module_cli(
        "run",
        "mine.yaml",
        "--name",
        "hopeless",
        "-s",
        "trials=1",
        "-s",
        "space={}",
        "-s",
        "metric=val/acuracy",
    )
    assert done.returncode == 3
    assert "did you mean 'val/accuracy'?" in done.stdout
    assert module_cli.json("status", "hopeless")["state"] == "failed"
    best = module_cli("best", "hopeless")
    assert best.returncode == 3
    assert best.stderr.startswith("no trial of sweep 'hopeless' has completed")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("nowhere:Mine", "there is no module 'nowhere'"),
        ("somewhere.else_:Mime", "did you mean 'Mine'?"),
        ("somewhere.else_:Net", "does not derive from"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_refused_before_anything_exists(
    module_cli: CommandLine, trials: object, task: str, said: str
) -> None:
    del trials
    done = module_cli("run", "mine.yaml", "--name", "wrong", "-s", f"task.name={task}")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (module_cli.root / "wrong").exists()
