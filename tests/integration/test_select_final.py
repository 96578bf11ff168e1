"""`select: final`: export, MLflow and Optuna take the end of each complete trial."""

from __future__ import annotations

import pytest
from mlflow import MlflowClient
from safetensors.torch import load_file

from sweeps.ledger.ledger import Ledger
from tests.integration.commandline import CommandLine

pytestmark = pytest.mark.usefixtures("store")

LOOP = """
import torch

LOSSES = {0: [0.1, 0.5, 0.4], 1: [0.6, 0.2, 0.3]}


def run(config, context):
    number = config.task.arguments["number"]
    model = torch.nn.Linear(1, 1)
    for epoch in context.remaining_epochs():
        torch.nn.init.constant_(model.weight, 10.0 * number + epoch)
        yield {"val/loss": LOSSES[number][epoch]}, {"model": model.state_dict()}
"""
SPEC = """
name: last
task: {name: "losses:run", number: 0}
metric: val/loss
mode: min
select: final
trials: 2
budget: {epochs: 3}
space: {task.number: {choice: [0, 1]}}
search: {sampler: grid}
"""


def test_final_takes_the_end_of_each_trial(cli: CommandLine) -> None:
    cli.write("losses.py", LOOP)
    cli.write("last.yaml", SPEC)
    printed = cli.ok("run", "last.yaml")
    trials = cli.json("trials", "last")
    values = {one["params"]["task.number"]: (one["number"], one["value"]) for one in trials}
    best = values[1][0]
    assert {key: value for key, (_, value) in values.items()} == {0: 0.4, 1: 0.3}
    assert f"best: trial {best} with 0.3" in printed
    assert cli.json("status", "last")["best"]["number"] == best
    assert cli.json("best", "last")["best_checkpoint"] == trials[best]["checkpoint"]
    assert cli.json("compare", "last")["leaders"][0]["number"] == best

    cli.ok("best", "last", "--export", "out")
    weights = load_file(cli.directory / "out/model.safetensors")
    assert weights["weight"].item() == 12.0  # of the last epoch, not of the better one before
    told = Ledger.open(cli.root / "last/ledger.db").frozen_trials()
    assert {one.number: one.value for one in told} == dict(values.values())

    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("last")
    assert experiment is not None
    runs = {
        run.data.tags.get("gradsweep.trial"): run.data.tags
        for run in client.search_runs([experiment.experiment_id])
    }
    assert runs[None]["best_trial"] == str(best)
    assert runs[None]["best_value"] == "0.3"
    assert {runs[str(number)]["best_epoch"] for number in (0, 1)} == {"3"}
    refused = cli("resume", "last", "-s", "select=checkpoint")
    assert refused.returncode == 2
    assert "select is final" in refused.stderr
