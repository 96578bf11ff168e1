"""Trials that pause and are promoted: a killed sweep equals an uninterrupted one."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from sweeps.ledger.reader import LedgerReader
from tests.chaos.killed_runs import differences, without_measured
from tests.integration.commandline import SMALL, CommandLine, wait_until
from trainable.checkpoint import CheckpointStore
from trainable.store.metrics_file import read_rows

pytestmark = pytest.mark.usefixtures("store")

# In few and heavy steps: the kill comes in the middle of a promoted trial.
STEPS, TRIALS = 6, 5
SERIAL = (
    SMALL.replace("model: mlp, width: 32", "model: cnn, width: 64")
    .replace("trials: 4", f"trials: {TRIALS}\nconcurrency: 1")
    .replace("scheduler: asha", "scheduler: asha_promote")
    + "train: {batch_size: 256}\n"
)
SAME = ("number", "state", "params", "value", "step", "epoch", "reason")


def _runs(cli: CommandLine, name: str) -> dict[str, Run]:
    """The one MLflow run of each trial, and that of the sweep, by the trial's number."""
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    found = {run.data.tags.get("gradsweep.trial", "sweep"): run for run in runs}
    assert len(found) == len(runs), "a trial has one run"
    return found


def _reports(cli: CommandLine, name: str) -> dict[int, dict[int, float]]:
    return LedgerReader(cli.root / name / "ledger.db").reports()


def _states(cli: CommandLine, name: str, number: int) -> dict[int, Any]:
    """What is kept of a trial, by step."""
    store = CheckpointStore(cli.root / f"{name}/trials/{number:04d}")
    return {one.step: without_measured(store.load(one)) for one in store.generations()}


def _told(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: trial[key] for key in SAME} for trial in trials]


@pytest.mark.chaos  # how they are promoted after a death is in `tests/unit/sweeps/search`, too
def test_sweep_killed_in_a_promotion_promotes_the_same(
    cli: CommandLine,
) -> None:
    cli.write("sweep.yaml", SERIAL)
    cli.ok("run", "sweep.yaml", "--name", "once")
    once = cli.json("trials", "once")
    assert [trial["state"] for trial in once].count("complete") == 1
    assert {trial["epoch"] for trial in once} == {1, 2, 4}, "one of two goes on from each rung"
    assert {trial["attempts"] for trial in once} == {1}, "a promotion is no further attempt"

    with (cli.directory / "killed.txt").open("wb") as printed:
        driver = cli.popen("run", "sweep.yaml", "--name", "killed", stdout=printed)
        text = cli.directory / "killed.txt"
        wait_until(lambda: driver.poll() is not None or " promoted" in text.read_text())
        running = cli.json("trials", "killed")
        os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert [trial["state"] for trial in running][:2].count("waiting") >= 1
    assert not any(trial["state"] in ("pruned", "complete") for trial in running)
    cli.ok("resume", "killed")

    assert _told(cli.json("trials", "killed")) == _told(once)
    assert _reports(cli, "killed") == _reports(cli, "once")
    runs = _runs(cli, "killed")
    assert len(runs) == TRIALS + 1
    for trial in once:
        number = trial["number"]
        whole, found = (_states(cli, name, number) for name in ("once", "killed"))
        assert max(whole) == max(found), f"trial {number} was saved where it came to"
        for step in whole.keys() & found.keys():
            assert differences(whole[step], found[step]) == [], f"trial {number}, step {step}"
        rows = read_rows(cli.root / f"killed/trials/{number:04d}")
        assert [row.step for row in rows] == list(range(1, trial["epoch"] * STEPS + 1))
        run = runs[str(number)]
        complete = trial["state"] == "complete"
        assert not complete or whole.keys() == found.keys()
        assert run.info.status == "FINISHED"
        assert run.data.tags.get("stopped_by", "") == ("" if complete else "asha_promote")

    # What ends the whole sweep is read from the ledger: nothing has to be started for it.
    ended = cli.ok("resume", "killed", "-s", "trials=9", "-s", "stop.value=100")
    assert "stop.value ended the sweep: val/loss" in ended
    assert "resume killed -s stop.value=null" in ended
    status = cli.json("status", "killed")
    assert (status["state"], status["stopped_by"]["key"]) == ("finished", "stop.value")
    assert _runs(cli, "killed")["sweep"].data.tags["stopped_by"] == "stop.value"
