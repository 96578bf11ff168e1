"""`sweep resume NAME TRIAL --finish`: a new trial trains an ended one on, exactly."""

from __future__ import annotations

import signal
from typing import Any

import optuna
import pytest
import torch
from mlflow import MlflowClient

from sweeps.ledger.attributes import ROLE
from sweeps.ledger.ledger import Ledger
from sweeps.paths import SweepPaths
from sweeps.spec.revisions import read_spec
from sweeps.stores import trial_store
from tests.chaos.killed_runs import curve
from tests.integration.commandline import SMALL, CommandLine, no_process_of, wait_until
from tests.time_limits import scaled
from trainable.store.metrics_file import read_resumptions, read_rows

pytestmark = pytest.mark.usefixtures("store")

EPOCHS = 16
PRUNING = (
    SMALL.replace("model: mlp, width: 32", "model: cnn, width: 64")
    .replace("epochs: 4", f"epochs: {EPOCHS}")
    .replace("sampler: tpe, startup_trials: 2", "sampler: random")
    + "train: {batch_size: 128}\n"
)
UNPRUNED = PRUNING.replace("name: small", "name: whole").replace(
    "scheduler: asha", "scheduler: none"
)


def _weights(cli: CommandLine, name: str, number: int) -> dict[str, Any]:
    paths = SweepPaths(cli.root, name)
    store = trial_store(paths, read_spec(paths.spec).spec, number)
    newest = store.newest()
    assert newest is not None
    return store.load(newest)["model"]


@pytest.mark.chaos
def test_finished_trial_equals_the_unpruned_one(cli: CommandLine) -> None:
    cli.write("small.yaml", PRUNING)
    cli.write("whole.yaml", UNPRUNED)
    cli.ok("run", "small.yaml")
    before = cli.json("trials", "small")
    pruned = [one["number"] for one in before if one["state"] == "pruned"]
    assert pruned
    number, new = pruned[-1], len(before)
    refused = cli("resume", "small", str(number), "77", "--finish")
    assert refused.returncode == 2
    assert "no trial 77" in refused.stderr
    assert len(cli.json("trials", "small")) == new

    # The driver is killed in the middle of it, and the sweep is resumed without the option.
    directory = cli.root / f"small/trials/{new:04d}"
    driver = cli.start("resume", "small", str(number), "--finish")
    steps = before[number]["step"] + 15
    wait_until(lambda: driver.poll() is not None or len(read_rows(directory)) >= steps, every=0.05)
    assert driver.poll() is None, driver.communicate()
    token = cli.token("small")
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=scaled(60))
    states = [one["state"] for one in cli.json("trials", "small")]
    assert states == [*(one["state"] for one in before), "waiting"]
    cli.ok("resume", "small")
    assert no_process_of(token)

    cli.ok("run", "whole.yaml")
    assert curve(directory) == curve(cli.root / f"whole/trials/{number:04d}")
    found, expected = (_weights(cli, *one) for one in (("small", new), ("whole", number)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)

    configs = [cli.root / f"small/trials/{one:04d}/config.yaml" for one in (number, new)]
    assert configs[0].read_text() == configs[1].read_text()
    after = cli.json("trials", "small")
    assert after[:new] == before  # the pruned trial stays as it was
    whole = cli.json("trials", "whole")[number]
    assert (after[new]["state"], after[new]["finishes"]) == ("complete", number)
    same = ("value", "params", "step", "epoch")
    assert [after[new][key] for key in same] == [whole[key] for key in same]
    _assert_one_trial_and_run(cli, number, new, after)

    # Asking again trains nothing, and the next trial of the search is the one it would have been.
    cli.ok("resume", "small", str(number), str(number), "--finish")
    assert cli.json("trials", "small") == after
    cli.ok("resume", "small", "-s", "trials=5")
    cli.ok("resume", "whole", "-s", "trials=5")
    one, other = (cli.json("trials", name)[-1] for name in ("small", "whole"))
    assert one["number"] == new + 1
    assert one["params"] == other["params"]


LONGER = (
    SMALL.replace("name: small", "name: short")
    .replace("trials: 4", "trials: 1")
    .replace("  train.schedule.warmup: {uniform: [0.0, 0.3]}\n", "")
    + "train: {batch_size: 128, schedule: {name: wsd, warmup: 5, decay: 0.3}}\n"
    + "checkpoint: {every: 4 epochs}\n"
)
WHOLE = LONGER.replace("name: short", "name: whole").replace("epochs: 4", "epochs: 6")


def test_complete_trial_trained_longer_equals_one_of_that_length(cli: CommandLine) -> None:
    """Only the steps after the constant stage are trained, up to the same bits."""
    cli.write("short.yaml", LONGER)
    cli.write("whole.yaml", WHOLE)
    cli.ok("run", "short.yaml")
    cli.ok("resume", "short", "0", "--finish", "-s", "budget.epochs=6")
    cli.ok("run", "whole.yaml")
    before, longer = cli.json("trials", "short")
    assert (before["epoch"], longer["epoch"], longer["finishes"]) == (4, 6, 0)
    found, expected = (_weights(cli, *one) for one in (("short", 1), ("whole", 0)))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert curve(cli.root / "short/trials/0001") == curve(cli.root / "whole/trials/0000")
    assert read_resumptions(cli.root / "short/trials/0001") == [34]


def _assert_one_trial_and_run(
    cli: CommandLine, number: int, new: int, trials: list[dict[str, Any]]
) -> None:
    """Assert what Optuna and MLflow have of a trial that finished another one."""
    ledger = Ledger.open(cli.root / "small/ledger.db")
    finishing = [one for one in ledger.frozen_trials() if ROLE in one.user_attrs]
    assert [(one.number, one.user_attrs[ROLE]["origin"]) for one in finishing] == [(new, number)]
    assert finishing[0].state == optuna.trial.TrialState.COMPLETE
    assert sorted(finishing[0].intermediate_values) == list(range(1, EPOCHS + 1))
    assert finishing[0].value == trials[new]["value"]
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    run = client.get_run(trials[new]["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    tags = run.data.tags
    assert (tags["gradsweep.finishes"], tags["outcome"]) == (str(number), "complete")
    assert tags["gradsweep.attempts"] == "2"
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    rows = read_rows(cli.root / f"small/trials/{new:04d}")
    assert sorted((m.step, m.value) for m in losses) == [
        (row.step, row.metrics["train/loss"]) for row in rows
    ]
    pruned = client.get_run(trials[number]["mlflow_run_id"])
    assert pruned.data.tags["outcome"] == "pruned"
