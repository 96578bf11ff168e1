"""The runs of a sweep, read back by MLflow's own client.

The sweep has a trial that is healthy, one whose gradients are huge, and one that diverges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.integration.commandline import CommandLine
from tracking.unsent_rows import thin_rows
from trainable.store.metrics_file import Row, read_rows

pytestmark = pytest.mark.usefixtures("module_store")

EVERY = 4

TASK = """
import torch
from torch import nn

from trainable import Data, Task

FACTORS = {"healthy": 1.0, "huge": 1000.0, "diverging": 1.0}


class Kinds(Task):
    def __init__(self, *, kind):
        self.kind, self.passes = kind, 0

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def build_data(self):
        inputs = torch.randn(70, 4, generator=torch.Generator().manual_seed(1))
        targets = (inputs.sum(1) > 0).long()
        return Data(train=(inputs[:50], targets[:50]), val=(inputs[50:], targets[50:]))

    def loss(self, model, batch):
        total, weight = super().loss(model, batch)
        if model.training:
            self.passes += 1
            total = total * FACTORS[self.kind]
            if self.kind == "diverging" and self.passes == 11:
                total = total * float("nan")
        return total, weight
"""
SPEC = f"""
name: kinds
task: {{name: kinds_task:Kinds, kind: healthy}}
metric: val/loss
mode: min
trials: 4
concurrency: 1
seed: 7
budget: {{epochs: 3}}
space:
  task.kind: {{choice: [healthy, huge, diverging]}}
  train.optimizer.lr: {{loguniform: [1.0e-3, 1.0e-2]}}
search: {{sampler: random}}
train: {{batch_size: 5, precision: fp16, layer_norms_every: 6}}
tracking: {{every: {EVERY}}}
"""
EPOCHS, STEPS, FAILING = 3, 30, 11


@dataclass
class Recorded:
    """The sweep, and MLflow's view of it."""

    cli: CommandLine
    client: MlflowClient
    trials: list[dict[str, Any]]
    parent: str

    def of(self, kind: str) -> tuple[dict[str, Any], Any]:
        """The first trial of a kind, and its run."""
        trial = next(t for t in self.trials if t["params"]["task.kind"] == kind)
        return trial, self.client.get_run(trial["mlflow_run_id"])

    def rows(self, trial: dict[str, Any]) -> list[Row]:
        return read_rows(self.cli.root / "kinds" / "trials" / f"{trial['number']:04d}")


@pytest.fixture(scope="module")
def found(module_cli: CommandLine) -> Recorded:
    module_cli.write("kinds_task.py", TASK)
    module_cli.write("kinds.yaml", SPEC)
    module_cli.ok("run", "kinds.yaml")
    module_cli.ok("sync", "kinds")
    client = MlflowClient(tracking_uri=f"sqlite:///{module_cli.root / 'mlflow.db'}")
    trials = module_cli.json("trials", "kinds")
    assert {t["params"]["task.kind"] for t in trials} == {"healthy", "huge", "diverging"}
    parent = module_cli.json("status", "kinds")["mlflow_run_id"]
    return Recorded(module_cli, client, trials, parent)


@pytest.mark.chaos
def test_curves_are_downsampled_and_each_point_sent_once(found: Recorded) -> None:
    for trial in found.trials:
        ended = trial["state"] == "failed"
        wanted = {
            (key, row.step): (value, row.timestamp_ms)
            for row in thin_rows(found.rows(trial), EVERY, ended=ended)
            for key, value in row.metrics.items()
        }
        run_id = trial["mlflow_run_id"]
        keys = found.client.get_run(run_id).data.metrics
        points = [m for key in keys for m in found.client.get_metric_history(run_id, key)]
        assert {(m.key, m.step): (m.value, m.timestamp) for m in points} == wanted
        assert len(points) == len(wanted)


@pytest.mark.chaos
def test_steps_of_a_downsampled_curve(found: Recorded) -> None:
    trial, run = found.of("healthy")
    assert len(found.rows(trial)) == STEPS
    steps = [m.step for m in found.client.get_metric_history(run.info.run_id, "train/loss")]
    assert steps == [1, 4, 8, 10, 12, 16, 20, 24, 28, 30]
    layers = found.client.get_metric_history(run.info.run_id, "grad_norm/0 Linear")
    assert [m.step for m in layers] == [6, 12, 18, 24, 30]


@pytest.mark.chaos
def test_metrics_of_a_trial(found: Recorded) -> None:
    trial, run = found.of("healthy")
    assert {
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "train/clip_fraction",
        "train/samples_per_second",
        "num_skipped_steps",
        "memory/process_mb",
        "val/loss",
        "val/accuracy",
        "best/val/loss",
        "grad_norm/0 Linear",
        "grad_norm/2 Linear",
        "epoch",
    } <= run.data.metrics.keys()
    assert run.data.metrics["best/val/loss"] == trial["value"]
    assert 50 < run.data.metrics["memory/process_mb"] < 5000
    # The applied rate: cosine, without warmup, from the peak that was searched.
    rates = {m.step: m.value for m in found.client.get_metric_history(run.info.run_id, "train/lr")}
    peak = trial["params"]["train.optimizer.lr"]
    for step, rate in rates.items():
        assert rate == pytest.approx(peak * (1 + math.cos(math.pi * (step - 1) / STEPS)) / 2)


@pytest.mark.chaos
def test_fp16_skipped_steps_are_counted_apart(found: Recorded) -> None:
    """Gradients a thousand times as large overflow until the scale has come down."""
    for kind, skips in (("huge", True), ("healthy", False)):
        trial, run = found.of(kind)
        skipped = STEPS - len(found.rows(trial))
        assert (skipped > 0) == skips
        counts = found.client.get_metric_history(run.info.run_id, "num_skipped_steps")
        assert [m.value for m in counts][-1] == skipped
        assert sorted(m.value for m in counts) == [m.value for m in counts]
        assert len(counts) == EPOCHS


@pytest.mark.chaos
def test_health_is_on_trials_and_summed_on_the_sweep(found: Recorded) -> None:
    trial, run = found.of("huge")
    assert "gradient norm" in run.data.tags["health"]
    assert "health" not in found.of("healthy")[1].data.tags
    told = found.client.get_run(found.parent).data.tags["health"]
    assert f"of {len(found.trials)} trials; " in told
    assert f"trial {trial['number']}: " in told
    assert all(sentence in told for sentence in run.data.tags["health"].split("; "))
