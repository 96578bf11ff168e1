"""The runs of a sweep, read back by MLflow's own client.

The sweep has a trial that is healthy, one whose gradients are huge, and one that diverges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.integration.commandline import CommandLine
from tracking.trial_log import thin_rows
from trainable.precision import device_name, find_device
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


def test_steps_of_a_downsampled_curve(found: Recorded) -> None:
    trial, run = found.of("healthy")
    assert len(found.rows(trial)) == STEPS
    steps = [m.step for m in found.client.get_metric_history(run.info.run_id, "train/loss")]
    assert steps == [1, 4, 8, 10, 12, 16, 20, 24, 28, 30]
    layers = found.client.get_metric_history(run.info.run_id, "grad_norm/0 Linear")
    assert [m.step for m in layers] == [6, 12, 18, 24, 30]


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


def test_parameters_are_recorded_searched_and_resolved(found: Recorded) -> None:
    trial, run = found.of("huge")
    params = run.data.params
    assert params["task.kind"] == "huge"
    assert float(params["train.optimizer.lr"]) == trial["params"]["train.optimizer.lr"]
    assert not {key for key in params if "seed" in key or key.startswith("space.")}
    assert params["train.precision"] == "fp16"
    for each in found.trials:  # also the one that failed within its first epochs
        tags = found.client.get_run(each["mlflow_run_id"]).data.tags
        assert tags["gradsweep.precision"] == "fp16"
        assert tags["gradsweep.device"] == device_name(find_device(None))
    assert params["budget.epochs"] == "3"
    parent = found.client.get_run(found.parent).data.params
    assert (parent["tracking.every"], parent["trials"]) == (str(EVERY), "4")


def test_ends_and_best_step_of_each_trial(found: Recorded) -> None:
    for trial in found.trials:
        run = found.client.get_run(trial["mlflow_run_id"])
        failed = trial["params"]["task.kind"] == "diverging"
        assert run.info.status == ("FAILED" if failed else "FINISHED")
        assert run.data.tags["stopped_by"] == ""
        reports = [row for row in found.rows(trial) if "val/loss" in row.metrics]
        best = min(reports, key=lambda row: row.metrics["val/loss"])
        assert run.data.tags["best_step"] == str(best.step)
        assert run.data.tags["best_epoch"] == str(int(best.metrics["epoch"]))
    trial, run = found.of("diverging")
    assert run.data.tags["reason"].startswith("non_finite")
    assert run.data.tags["reason"] == trial["reason"]
    assert found.rows(trial)[-1].step == FAILING - 1


def test_health_is_on_trials_and_summed_on_the_sweep(found: Recorded) -> None:
    trial, run = found.of("huge")
    assert "gradient norm" in run.data.tags["health"]
    assert "health" not in found.of("healthy")[1].data.tags
    told = found.client.get_run(found.parent).data.tags["health"]
    assert f"of {len(found.trials)} trials; " in told
    assert f"trial {trial['number']}: " in told
    assert all(sentence in told for sentence in run.data.tags["health"].split("; "))


def test_sweep_run_records_command_and_provenance(found: Recorded, tmp_path: Path) -> None:
    run = found.client.get_run(found.parent)
    tags = run.data.tags
    best = found.cli.json("best", "kinds")
    assert run.info.status == "FINISHED"
    assert tags["gradsweep.command"].endswith("sweep run kinds.yaml")
    assert (tags["best_trial"], tags["best_value"]) == (str(best["number"]), repr(best["value"]))
    assert tags["best_step"] == found.client.get_run(best["mlflow_run_id"]).data.tags["best_step"]
    assert tags["curves"].startswith("the first step, every 4 steps, and each epoch's end")
    for digest in ("gradsweep.code", "gradsweep.data"):
        assert len(tags[digest]) == 64, digest
    assert {"gradsweep.version.torch", "gradsweep.host", "mlflow.user"} <= tags.keys()
    spec = found.client.download_artifacts(found.parent, "sweep.yaml", str(tmp_path))
    assert Path(spec).read_bytes() == (found.cli.root / "kinds" / "sweep.yaml").read_bytes()
