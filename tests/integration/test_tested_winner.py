"""A sweep whose trials pause and resume: its best trial is tested, and trained again."""

from __future__ import annotations

import pytest
from mlflow import MlflowClient

from sweeps import Sweep
from tests.integration.commandline import CommandLine
from trainable.store.metrics_file import read_rows
from trainable.store.notes import read_tested

pytestmark = pytest.mark.usefixtures("store")

SPEC = """
name: arms
task: {name: spiral, samples: 40}
metric: val/loss
mode: min
trials: 3
seed: 1
budget: {epochs: 4}
space: {train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}}
search: {sampler: random}
early_stopping: {scheduler: asha_promote, grace_epochs: 1, reduction: 3}
train: {batch_size: 40}
"""


def test_winner_is_tested_once_and_trained_again(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.write("arms.yaml", SPEC)
    cli.ok("run", "arms.yaml")
    monkeypatch.chdir(cli.directory)
    sweep = Sweep.open("arms", root=cli.root)
    best = sweep.best
    assert (best.epochs, best.state) == (4, "complete")  # it paused at epoch 1
    found = best.test()
    assert best.test() == found
    assert found == {n: v for n, v in sweep.best.metrics.items() if n.startswith("test/")}
    (recorded,) = read_tested(best.directory)

    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    assert best.run_id is not None
    run = client.get_run(best.run_id)
    assert (run.info.status, run.data.tags["outcome"]) == ("FINISHED", "complete")
    for name, value in found.items():
        history = client.get_metric_history(best.run_id, name)
        assert [(point.step, point.value) for point in history] == [(recorded.step, value)]

    cli.ok("train", "arms", str(best.number), "--dir", "again")
    assert len(read_rows(cli.directory / "again")) == len(read_rows(best.directory)) > 4
