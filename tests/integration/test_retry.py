"""`sweep resume --retry`: failed trials run again after a fix, each as one trial with one run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType

from sweeps.spec.revisions import read_spec
from tests.integration.commandline import CommandLine, no_process_of, wait_until
from tests.time_limits import scaled
from trainable.store.metrics_file import read_rows

pytestmark = pytest.mark.usefixtures("store")

TASK = '''
"""Spirals with a bug: the loss is wrong after epoch 2, and training fails in epoch 3."""

from trainable.tasks.spiral import Spiral

BUG = True


class Fragile(Spiral):
    def __init__(self) -> None:
        super().__init__(samples=60, width=8)
        self.step = 0

    def on_step_end(self, step: int) -> None:
        self.step = step
        if BUG and step == 15:
            raise ValueError("the bug")

    def loss(self, model, batch):
        loss, weight = super().loss(model, batch)
        return (2 * loss if BUG and self.step > 12 else loss), weight
'''
SPEC = """
name: frag
task: fragile:Fragile
metric: val/loss
mode: min
trials: 2
concurrency: 1
seed: 3
budget: {epochs: 4}
train: {batch_size: 32}
space: {train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-2]}}
search: {sampler: random}
failures: {same_failure_limit: 0}
"""


@pytest.fixture
def failed(cli: CommandLine) -> CommandLine:
    """A sweep of two trials that failed, and the corrected code."""
    cli.write("fragile.py", TASK)
    cli.write("frag.yaml", SPEC)
    done = cli("run", "frag.yaml")
    assert done.returncode == 3
    assert "sweep resume frag --retry" in done.stderr.splitlines()[-1]
    cli.write("fragile.py", TASK.replace("BUG = True", "BUG = False"))
    return cli


def _assert_one_training(cli: CommandLine, number: int) -> None:
    """Assert that ledger, files and MLflow show one whole training of the corrected code."""
    found = cli.json("show", "frag", str(number))
    assert (found["state"], found["epoch"], found["reason"]) == ("complete", 4, None)
    assert len(found["reports"]) == 4
    [failure] = found["failed_attempts"]
    assert (failure["attempt"], failure["reason"]) == (1, "ValueError: the bug")
    assert "fragile.py" in failure["changes"]
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    run = client.get_run(found["mlflow_run_id"])
    query = f"tags.`gradsweep.trial` = '{number}'"
    runs = client.search_runs([run.info.experiment_id], query, ViewType.ALL)
    assert [one.info.run_id for one in runs] == [run.info.run_id]
    assert (run.info.status, run.data.tags["outcome"]) == ("FINISHED", "complete")
    assert not run.data.tags.get("failure.kind")
    assert "the bug" in run.data.tags["gradsweep.failed_attempts"]
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    rows = read_rows(cli.root / f"frag/trials/{number:04d}")
    assert [(m.step, m.value) for m in losses] == [(r.step, r.metrics["train/loss"]) for r in rows]


def _assert_exact(cli: CommandLine, number: int) -> None:
    said = cli.ok("train", "frag", str(number))
    assert f"the same as trial {number}, bit for bit, in all 24 steps" in said


@pytest.mark.chaos
def test_corrected_trial_is_one_training(failed: CommandLine) -> None:
    failed.ok("resume", "frag", "0", "--retry", "--accept-changes")
    assert _states(failed) == ["complete", "failed"]
    _assert_one_training(failed, 0)


@pytest.mark.chaos
@pytest.mark.parametrize("place", ["revision", "reopened", "trained"])
@pytest.mark.parametrize("fresh", [False, True])
def test_killed_retry_is_completed(failed: CommandLine, place: str, fresh: bool) -> None:
    paths = failed.root / "frag"
    reached = {
        "revision": lambda: read_spec(paths / "sweep.yaml").number == 2,
        "reopened": lambda: "waiting" in _states(failed) or "running" in _states(failed),
        "trained": lambda: len(read_rows(paths / "trials/0000")) > 20,
    }
    option = ("--fresh",) if fresh else ()
    driver = failed.start("resume", "frag", "--retry", "--accept-changes", *option)
    wait_until(lambda: driver.poll() is not None or reached[place](), every=0.01)
    if driver.poll() is None:
        token = failed.token("frag")
        driver.send_signal(signal.SIGKILL)
        driver.communicate(timeout=scaled(60))
        assert set(_states(failed)) <= {"failed", "waiting", "complete"}
        if set(_states(failed)) == {"failed"}:
            failed.ok("resume", "frag", "--retry", "--accept-changes", *option)
        else:
            failed.ok("resume", "frag", "--accept-changes")
        assert no_process_of(token)
    for number in (0, 1):
        _assert_one_training(failed, number)
        _assert_exact(failed, number)
    assert "nothing is missing" in failed.ok("sync", "frag", "--verify")
    assert not list(Path(paths).glob(".export-*"))


def _states(cli: CommandLine) -> list[str]:
    return [one["state"] for one in cli.json("trials", "frag")]
