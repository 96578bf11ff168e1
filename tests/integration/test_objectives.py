"""A sweep with two metrics through the real command line, killed once and resumed."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
from mlflow import MlflowClient
from optuna.trial import TrialState

from sweeps.ledger.reader import LedgerReader
from tests.integration.commandline import SMALL, CommandLine, no_process_of, wait_until
from trainable.checkpoint import CheckpointStore
from trainable.store.metrics_file import read_rows

pytestmark = pytest.mark.usefixtures("store")

METRICS = ("val/loss", "train/samples_per_second")
EPOCHS, TRIALS = 6, 4
SPEC = (
    SMALL.replace("model: mlp, width: 32", "model: cnn, width: 64")
    .replace("metric: val/loss", f"metric: [{', '.join(METRICS)}]")
    .replace("mode: min", "mode: [min, max]")
    .replace("epochs: 4", f"epochs: {EPOCHS}")
    .replace("scheduler: asha, grace_epochs: 1, reduction: 2", "scheduler: none")
    + "train: {batch_size: 256}\n"
)


def _reports(cli: CommandLine) -> list[dict[int, Any]]:
    """Every trial's reports."""
    view = LedgerReader(cli.root / "small/ledger.db")
    return [dict(view.reports_of(trial.number)) for trial in view.trials]


def _kill_and_resume(cli: CommandLine) -> tuple[list[dict[int, Any]], str]:
    """Return what had been reported when the driver was killed, and what the resume printed."""
    cli.write("small.yaml", SPEC)
    driver = cli.start("run", "small.yaml")
    ledger = cli.root / "small/ledger.db"

    def far_enough() -> bool:
        if driver.poll() is not None:
            return True
        return (
            ledger.exists()
            and (cli.root / "small/sweep.yaml").exists()
            and any(len(reports) >= 2 for reports in LedgerReader(ledger).reports().values())
        )

    wait_until(far_enough)
    assert driver.poll() is None, driver.communicate()
    token = cli.token("small")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = _reports(cli)
    assert any(len(reports) >= 2 for reports in before)
    printed = cli.ok("resume", "small")
    cli.ok("sync", "small")
    assert no_process_of(token)
    return before, printed


def _front(trials: list[dict[str, Any]]) -> set[int]:
    """The trials for which there is none that is as good in both and better in one."""
    values = {trial["number"]: trial["value"] for trial in trials}
    return {
        number
        for number, (loss, speed) in values.items()
        if not any(
            other <= loss and fast >= speed and [other, fast] != [loss, speed]
            for other, fast in values.values()
        )
    }


@pytest.mark.chaos
def test_two_metrics_from_first_report_to_pareto_front(cli: CommandLine) -> None:
    before, printed = _kill_and_resume(cli)
    trials = cli.json("trials", "small")
    assert [trial["state"] for trial in trials] == ["complete"] * TRIALS
    assert max(trial["attempts"] for trial in trials) == 2
    after = _reports(cli)
    study = optuna.load_study(
        storage=f"sqlite:///{cli.root / 'small/ledger.db'}", study_name="sweep"
    )
    for trial, told in zip(trials, study.trials, strict=True):
        number, reports = trial["number"], after[trial["number"]]
        assert list(reports) == list(range(1, EPOCHS + 1))
        if number < len(before):  # what was told once stays, also what was measured
            assert reports.items() >= before[number].items()
        # one report's values, those of the best checkpoint
        best = min(reports.values(), key=lambda values: values[0])
        assert (told.state, told.values) == (TrialState.COMPLETE, best)
        assert trial["value"] == best
        directory = cli.root / f"small/trials/{number:04d}"
        generation = CheckpointStore(directory).best()
        assert generation is not None
        assert generation.value == best[0]
        if trial["attempts"] == 1:
            last = read_rows(directory)[-1].metrics
            assert [last[f"best/{metric}"] for metric in METRICS] == best
    front = _front(trials)
    assert front == {trial.number for trial in study.best_trials}
    _assert_shown(cli, front, trials, printed)
    _assert_recorded(cli, front)


def _assert_shown(
    cli: CommandLine, front: set[int], trials: list[dict[str, Any]], printed: str
) -> None:
    for number in front:
        assert f"\n  trial {number}: val/loss " in printed
        assert f"  trial {number}: val/loss " in cli.ok("status", "small")
    assert {one["number"] for one in cli.json("status", "small")["best"]} == front
    assert {one["number"] for one in cli.json("best", "small")} == front
    assert f"front of {len(front)}" in cli.ok("list")
    for command in (["trials", "small"], ["compare", "small"], ["show", "small", "0"]):
        words = cli.ok(*command).split()
        assert set(METRICS) <= set(words)
    leaders = cli.json("compare", "small")["leaders"]
    assert {one["number"] for one in leaders if one["pareto"]} == front
    assert [one["pareto"] for one in leaders] == sorted(
        (one["pareto"] for one in leaders), reverse=True
    )

    chosen, out = min(front), cli.directory / "out"
    if len(front) > 1:
        refused = cli("best", "small", "--export", str(out))
        assert refused.returncode == 2
        assert "on the Pareto front" in refused.stderr
        assert not out.exists()
    for number in sorted(set(range(TRIALS)) - front):  # any trial can be exported
        other = cli.directory / f"other-{number}"
        cli.ok("best", "small", str(number), "--export", str(other))
        assert "Not on the Pareto front of" in (other / "model_card.md").read_text()
    cli.ok("best", "small", str(chosen), "--export", str(out))
    assert sorted(path.name for path in out.iterdir()) == [
        "config.yaml",
        "model.safetensors",
        "model_card.md",
    ]
    card = (out / "model_card.md").read_text()
    assert f"val/loss {trials[chosen]['value'][0]!r} on the validation samples" in card
    assert "by the min of val/loss and max of train/samples_per_second: no other" in card


def _assert_recorded(cli: CommandLine, front: set[int]) -> None:
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    by_trial = {run.data.tags.get("gradsweep.trial"): run for run in runs}
    assert len(runs) == len(by_trial) == TRIALS + 1
    assert {run.info.status for run in runs} == {"FINISHED"}
    for number in range(TRIALS):
        run = by_trial[str(number)]
        assert run.data.tags["pareto"] == str(number in front).lower()
        assert {f"best/{metric}" for metric in METRICS} <= run.data.metrics.keys()
    sweep = by_trial[None]
    assert sweep.data.tags["pareto_front"] == ", ".join(map(str, sorted(front)))
    names = {artifact.path for artifact in client.list_artifacts(sweep.info.run_id)}
    assert "best" not in names, "nobody has chosen yet"
    page = Path(client.download_artifacts(sweep.info.run_id, "report.html")).read_text()
    assert '<section id="pareto-front">' in page
    missing = re.findall("<li class=missing>[^<]*: ([^<]*)", page)
    assert [one for one in missing if "too few trials" not in one] == [
        "this sweep stops no trial early.",
        "it needs 30 trials with a value, and there are 4.",
    ]
    assert "report.html" in names
