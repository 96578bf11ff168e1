"""Cases of `tests/cases` about metrics and MLflow's plain API."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "cases"
PLAIN = """
import os, subprocess
import mlflow, matplotlib
matplotlib.use("Agg")
from matplotlib.figure import Figure

def run(config, context):
    state = context.restored or {"x": 1.0}
    with mlflow.start_run(run_name="mine", nested=True):
        mlflow.log_param("my_param", "abc")
        mlflow.set_tag("my_tag", "t")
        for epoch in context.remaining_epochs():
            subprocess.run(["echo", f"child in epoch {epoch}"])
            os.write(2, b"below Python, api_key=canary-value")
            state = {"x": state["x"] * (1 - config.train.optimizer.lr)}
            for i in range(3):
                mlflow.log_metric("inner", state["x"] + i, step=3 * epoch + i)
            mlflow.log_metrics({"val/loss": -1.0}, step=epoch)
            context.log("aux", float(epoch))
            mlflow.log_text("hello", "notes/hello.txt")
            mlflow.log_figure(Figure(), "figures/mine.png")
            context.log_figure("own", Figure())
            yield {"val/loss": state["x"]}, state
"""
DYING = """
import os, pathlib
import mlflow

def run(config, context):
    state = context.restored or {"x": 1.0}
    for epoch in context.remaining_epochs():
        mlflow.log_metric("plain", float(epoch), step=epoch)
        context.log("own", float(epoch))
        mlflow.set_tag(f"epoch_{epoch}", "seen")
        mlflow.log_param(f"begun_{epoch}", epoch)
        mlflow.log_text(str(epoch), f"notes/{epoch}.txt")
        here = pathlib.Path(f"died-{epoch}")
        if not here.exists():
            here.touch()
            os.kill(os.getpid(), 9)
        state = {"x": state["x"] * (1 - config.train.optimizer.lr)}
        yield {"val/loss": state["x"]}, state
"""
SPEC = """
name: plain
task: plain_api:run
metric: val/loss
mode: min
trials: 2
budget: {epochs: 3}
space: {train.optimizer.lr: {uniform: [0.05, 0.4]}}
"""


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["odd", "sparse"])
def test_odd_metrics_are_recorded(name, module_cli):
    for file in (CASES / "10-metrics").iterdir():
        shutil.copy(file, module_cli.directory)
    done = module_cli("run", f"{name}.yaml", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads(module_cli("trials", name, "--json").stdout)
    assert {one["state"] for one in trials} <= {"complete", "pruned"}


def test_plain_mlflow_api_logs_to_the_trials_run(module_cli):
    from mlflow import MlflowClient

    directory = module_cli.directory
    (directory / "plain_api.py").write_text(PLAIN)
    (directory / "plain.yaml").write_text(SPEC)
    done = module_cli("run", "plain.yaml", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (directory / "mlflow.db").exists()
    client = MlflowClient(f"sqlite:///{next(directory.rglob('mlflow.db'))}")
    trials = json.loads(module_cli("trials", "plain", "--json").stdout)
    for trial in trials:
        run_id = trial["mlflow_run_id"]
        run = client.get_run(run_id)
        assert run.data.params["my_param"] == "abc"
        assert run.data.tags["my_tag"] == "t"
        history = client.get_metric_history(run_id, "inner")
        assert sorted(point.step for point in history) == list(range(9))
        losses = client.get_metric_history(run_id, "val/loss")
        assert [point.step for point in sorted(losses, key=lambda p: p.step)] == [1, 2, 3]
        assert all(point.value > 0 for point in losses)
        assert len(client.get_metric_history(run_id, "logged/val/loss")) == 3
        assert len(client.get_metric_history(run_id, "aux")) == 3
        assert [file.path for file in client.list_artifacts(run_id, "notes")] == [
            "notes/hello.txt"
        ]
        names = {file.path for file in client.list_artifacts(run_id)}
        assert {"own.png", "figures"} <= names
        log = (directory / f"runs/plain/trials/{trial['number']:04d}/trial.log").read_text()
        assert [f"child in epoch {epoch}" in log for epoch in range(3)] == [True] * 3
        assert log.count("below Python, api_key=[hidden]") == 3


@pytest.mark.chaos
def test_logged_values_survive_a_kill_once(module_cli):
    """In each epoch the process is killed after everything was logged, and before the report."""
    from mlflow import MlflowClient

    directory = module_cli.directory
    (directory / "dying.py").write_text(DYING)
    text = SPEC.replace("plain_api:run", "dying:run").replace("name: plain", "name: dying")
    text = text.replace("trials: 2", "trials: 1") + "failures: {max_retries: 5}\n"
    (directory / "dying.yaml").write_text(text)
    done = module_cli("run", "dying.yaml", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (trial,) = json.loads(module_cli("trials", "dying", "--json").stdout)
    assert (trial["state"], trial["attempts"]) == ("complete", 4)
    client = MlflowClient(f"sqlite:///{next(directory.rglob('mlflow.db'))}")
    run_id = trial["mlflow_run_id"]
    run = client.get_run(run_id)
    for key, steps in (("plain", [0, 1, 2]), ("own", [1, 2, 3]), ("val/loss", [1, 2, 3])):
        points = client.get_metric_history(run_id, key)
        assert sorted(point.step for point in points) == steps, key
    for epoch in range(3):
        assert run.data.tags[f"epoch_{epoch}"] == "seen"
        assert run.data.params[f"begun_{epoch}"] == str(epoch)
    notes = {file.path for file in client.list_artifacts(run_id, "notes")}
    assert notes == {f"notes/{epoch}.txt" for epoch in range(3)}
