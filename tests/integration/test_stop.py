"""`sweep stop` from another terminal: a running trial, and the sweep."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.integration.commandline import SMALL, CommandLine, no_process_of, wait_until
from tests.time_limits import scaled
from trainable.store.metrics_file import read_rows

pytestmark = pytest.mark.usefixtures("store")

EPOCHS = 80
CHANCE = 1.0
"""Seconds by which a busy machine may be late."""
LONG = (
    SMALL.replace("model: mlp, width: 32", "model: cnn, width: 64")
    .replace("epochs: 4", f"epochs: {EPOCHS}")
    .replace("scheduler: asha", "scheduler: none")
    + "train: {batch_size: 256}\nconcurrency: 2\n"
)


def _wait_for(cli: CommandLine, driver: subprocess.Popen[str], number: int, rows: int) -> None:
    directory = cli.root / f"small/trials/{number:04d}"
    wait_until(lambda: driver.poll() is not None or len(read_rows(directory)) >= rows)
    assert driver.poll() is None, driver.communicate()


def _runs(cli: CommandLine) -> dict[str | None, Run]:
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    runs = {run.data.tags.get("gradsweep.trial"): run for run in found}
    assert len(runs) == len(found)
    return runs


def _stop(cli: CommandLine, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = cli("stop", "small", *arguments, "--json")
    return done.returncode, json.loads(done.stdout)


def test_stopping_a_sweep_and_its_trials_from_elsewhere(cli: CommandLine) -> None:
    cli.write("small.yaml", LONG)
    driver = cli.start("run", "small.yaml")
    for number in (0, 1):
        _wait_for(cli, driver, number, rows=7)
    token = cli.token("small")

    code, stopped = _stop(cli, "--trial", "0")
    assert (code, stopped["done"], stopped["state"]) == (0, True, "pruned")
    first = cli.json("trials", "small")[0]
    assert (first["state"], first["reason"]) == ("pruned", "stopped by the user")
    assert first["value"] is not None
    assert 1 <= first["epoch"] < EPOCHS
    _wait_for(cli, driver, 2, rows=1)  # the sweep went on

    code, stopped = _stop(cli)
    assert (code, stopped["done"], stopped["state"]) == (0, True, "interrupted")
    printed, _ = driver.communicate(timeout=scaled(20))
    assert driver.returncode == 130, printed
    assert printed.splitlines()[-1] == "sweep resume small"
    ends = [line for line in printed.splitlines() if " interrupted (" in line]
    assert ends
    assert not any(line.endswith(" left") for line in ends), "a sweep that stops takes no longer"
    assert no_process_of(token)
    assert not (cli.root / "small/control").exists()

    cli.ok("sync", "small")  # an interrupted driver leaves to it what a busy machine still holds
    runs = _runs(cli)
    assert {key: run.info.status for key, run in runs.items()} == dict.fromkeys(runs, "KILLED")
    assert {key: run.data.tags["stopped_by"] for key, run in runs.items()} == {
        "0": "user",
        **dict.fromkeys(("1", "2", None), "interrupt"),
    }
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    rows = read_rows(cli.root / "small/trials/0000")
    losses = client.get_metric_history(runs["0"].info.run_id, "train/loss")
    assert sorted((m.step, m.value) for m in losses) == [
        (row.step, row.metrics["train/loss"]) for row in rows
    ]


@pytest.mark.chaos  # of the driver alone: `test_driver_exits_even_if_output_fails`
def test_immediate_stop_waits_for_nothing(cli: CommandLine) -> None:
    cli.write("small.yaml", LONG)
    driver = cli.start("run", "small.yaml")
    for number in (0, 1):
        _wait_for(cli, driver, number, rows=7)
    token = cli.token("small")
    asked = cli.root / f"small/control/{token}-now"
    stop = cli.start("stop", "small", "--now", "--json")
    wait_until(lambda: asked.exists() or driver.poll() is not None, every=0.005)
    started = time.monotonic()
    printed, _ = driver.communicate(timeout=scaled(20))
    assert time.monotonic() - started < scaled(2.0 + CHANCE)
    assert driver.returncode == 130, printed
    assert "exited immediately; what was saved is complete" in printed
    assert printed.splitlines()[-1] == "sweep resume small"
    said, _ = stop.communicate(timeout=scaled(20))
    stopped = json.loads(said)
    assert (stop.returncode, stopped["done"], stopped["state"]) == (0, True, "interrupted")
    wait_until(lambda: no_process_of(token), seconds=20)  # killed ones take a moment to go
    assert not (cli.root / "small/control").exists()
    assert [trial["state"] for trial in cli.json("trials", "small")] == ["waiting"] * 2
    assert cli.json("status", "small")["state"] == "interrupted"
