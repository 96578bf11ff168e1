"""A sweep whose budget is in steps: it pauses at reports, and ends a trial by patience."""

from __future__ import annotations

import json

import pytest
from mlflow import MlflowClient

from sweeps.ledger.ledger import Ledger
from tests.integration.commandline import CommandLine

pytestmark = pytest.mark.usefixtures("store")

TASK = """

import torch
from torch import nn
from trainable import Data, Task

LOSSES = {0: [5, 4, 4, 4, 4, 4], 1: [4, 3, 2, 1.5, 1.2, 1]}


class Judged(Task):
    '''Its n-th evaluation has the n-th loss.'''

    def __init__(self, *, curve: int):
        self.curve, self.evaluations = curve, 0

    def build_model(self):
        return nn.Linear(3, 2)

    def build_data(self):
        samples = (torch.randn(40, 3), torch.randint(2, (40,)))
        return Data(train=samples, val=samples)

    def evaluate(self, model, batches):
        self.samples = sum(len(inputs) for inputs, _ in batches)
        self.evaluations += 1
        return {"loss": LOSSES[self.curve][self.evaluations - 1], "samples": self.samples}
"""
SPEC = """
name: steps
task: {name: "judged:Judged", curve: 0}
metric: val/loss
mode: min
trials: 2
concurrency: 1
budget: {steps: 16, report_every: 3, val_batches: 2}
train: {batch_size: 8}
space: {task.curve: {choice: [0, 1]}}
search: {sampler: grid}
early_stopping: {scheduler: asha_promote, grace_epochs: 2, reduction: 2, patience: 3}
"""


def test_trials_of_a_budget_in_steps(cli: CommandLine) -> None:
    cli.write("judged.py", TASK)
    cli.write("steps.yaml", SPEC)
    done = cli("run", "steps.yaml")
    assert done.returncode == 0, done.stderr
    assert "plan: 2 trials x 6 reports" in done.stderr
    # Both have made two reports of three steps when they are compared. One is promoted.
    trials = {one["params"]["task.curve"]: one for one in cli.json("trials", "steps")}
    better, worse = trials[1], trials[0]
    assert (better["state"], better["epoch"], better["step"]) == ("complete", 6, 16)
    assert (worse["state"], worse["epoch"], worse["step"]) == ("pruned", 2, 6)
    assert worse["reason"].startswith("asha_promote at report 2: ")

    number = str(worse["number"])
    cli.ok("resume", "steps", number, "--finish")
    (finishing,) = [one for one in cli.json("trials", "steps") if one["finishes"] is not None]
    assert (finishing["state"], finishing["epoch"], finishing["step"]) == ("complete", 5, 15)
    assert finishing["value"] == 4
    assert finishing["reason"] == (
        "patience at report 5: val/loss not better than 4 of report 2 in 3 reports"
    )
    rows = [
        json.loads(line)["metrics"]
        for line in (cli.root / "steps/trials/0002/metrics.jsonl").read_text().splitlines()
    ]
    reports = [
        (row["report"], row["epoch"], row["val/samples"]) for row in rows if "report" in row
    ]
    assert reports == [(n, 3 * n / 5, 16) for n in range(1, 6)]

    told = {one.number: one for one in Ledger.open(cli.root / "steps/ledger.db").frozen_trials()}
    assert told[finishing["number"]].value == 4
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("steps")
    assert experiment is not None
    tags = {
        run.data.tags.get("gradsweep.trial"): run.data.tags
        for run in client.search_runs([experiment.experiment_id])
    }[str(finishing["number"])]
    assert (tags["outcome"], tags["stopped_by"], tags["best_step"]) == (
        "complete",
        "patience",
        "6",
    )
    refused = cli("resume", "steps", "-s", "budget.report_every=4")
    assert refused.returncode == 2
    assert "report_every: 3" in refused.stderr
