"""A sweep with outcome constraints: killed, resumed, judged anew, and with no feasible trial."""

from __future__ import annotations

import json
import os
import signal

import pytest
from mlflow import MlflowClient

from sweeps.errors import NO_SUCCESS
from tests.integration.commandline import SMALL, CommandLine, wait_until

pytestmark = pytest.mark.usefixtures("store")

LIMITED = SMALL.replace("trials: 4", "trials: 5\nconcurrency: 1") + (
    "constraints: {val/accuracy: {min: 0.85}}\n"
)
SAME = ("number", "state", "params", "value", "epoch", "reason", "feasible", "violations")


def test_constrained_sweep_from_its_start_to_a_change_of_its_limit(cli: CommandLine) -> None:
    cli.write("sweep.yaml", LIMITED)
    unknown = cli("run", "sweep.yaml", "-s", "constraints={val/latency: {max: 1}}")
    assert unknown.returncode == 2
    assert "constraints.val/latency: 'val/latency' is not reported" in unknown.stderr
    assert "val/accuracy" in unknown.stderr

    cli.ok("run", "sweep.yaml", "--name", "once")
    once = cli.json("trials", "once")
    with open(os.devnull, "wb") as nowhere:
        driver = cli.popen("run", "sweep.yaml", "--name", "killed", stdout=nowhere)
        wait_until(lambda: (cli.root / "killed/trials/0002/config.yaml").exists())
        os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    cli.ok("resume", "killed")
    trials = cli.json("trials", "killed")
    assert [{k: one[k] for k in SAME} for one in trials] == [
        {k: one[k] for k in SAME} for one in once
    ]

    accuracy = {one["number"]: cli.json("show", "killed", str(one["number"])) for one in trials}
    feasible = [one for one in trials if one["feasible"]]
    missing = [one for one in trials if one["feasible"] is False]
    assert feasible
    assert missing, accuracy
    assert all(one["violations"]["val/accuracy"] > 0 for one in missing)
    best = cli.json("best", "killed")
    assert best["number"] in [one["number"] for one in feasible]
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    for one in trials:
        tags = client.get_run(one["mlflow_run_id"]).data.tags
        assert tags["feasible"] == str(one["feasible"]).lower()
        assert bool(tags["constraint_violation"]) == (not one["feasible"])

    # No model is right in more than all cases: the ledger judges anew, and nothing trains.
    again = cli("resume", "killed", "-s", "constraints.val/accuracy.min=1.5")
    assert again.returncode == NO_SUCCESS
    assert "no trial is feasible; the closest is trial" in again.stderr
    status = json.loads(cli.ok("status", "killed", "--json"))
    assert (status["state"], status["best"]) == ("failed", None)
    assert status["closest"]["violations"]["val/accuracy"] > 0.5
    refused = cli("best", "killed")
    assert "at least 1.5 allowed" in refused.stderr
    other = cli("resume", "killed", "-s", "constraints={val/loss: {max: 1}}")
    assert other.returncode == 2
    assert "the metrics that had limits then" in other.stderr
