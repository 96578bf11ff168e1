"""Sweeps from Python, run for real: what is read back, interrupts, and killed parents."""

from __future__ import annotations

import doctest
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

import sweeps
from sweeps import Sweep
from sweeps.report.data import NotEnough
from sweeps.run.stop_requests import StopResult
from sweeps.sweep_lock import is_held
from tests.integration.commandline import CommandLine, wait_until
from tests.time_limits import scaled
from trainable.store.notes import RecordedTest

SPACE = {
    "train.optimizer.lr": {"loguniform": [1e-3, 1e-1]},
    "train.schedule.warmup": {"uniform": [0.0, 0.3]},
    "train.batch_size": {"choice": [32, 64]},
}
KEYS: dict[str, Any] = {
    "task": {"name": "digits", "model": "mlp", "width": 32},
    "metric": "val/loss",
    "mode": "min",
    "seed": 7,
    "concurrency": 1,
    "budget": {"epochs": 3},
    "space": SPACE,
    "search": {"sampler": "random"},
    "early_stopping": {"scheduler": "asha", "grace_epochs": 1, "reduction": 2},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def sweep(root: Path) -> Sweep:
    """A finished sweep, run from Python."""
    return Sweep(name="digits", trials=5, root=root, **KEYS).run()


@pytest.fixture
def listed(sweep: Sweep) -> list[dict[str, Any]]:
    """What the command line says of the same trials."""
    command = [Path(sys.executable).with_name("sweep"), "trials", "digits", "--json"]
    done = subprocess.run([*command, "--root", sweep.paths.root], capture_output=True, check=True)
    return list(json.loads(done.stdout))


def test_trials_are_those_of_the_command(sweep: Sweep, listed: list[dict[str, Any]]) -> None:
    frame = sweep.trials()
    assert list(frame.index) == [trial["number"] for trial in listed] == [0, 1, 2, 3, 4]
    assert set(listed[0]["params"]) == set(SPACE)
    for trial in listed:
        row = frame.loc[trial["number"]]
        assert {key: row[key] for key in SPACE} == trial["params"]
        assert (row["state"], row["val/loss"]) == (trial["state"], trial["value"])
        assert (row["epochs"], row["run_id"]) == (trial["epoch"], trial["mlflow_run_id"])
    assert frame["train.batch_size"].dtype.kind == "i"


def test_best_row_has_all_metrics_of_its_report(sweep: Sweep) -> None:
    best = sweep.best
    lines = (best.directory / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    lowest = min((row for row in rows if "val/loss" in row["metrics"]), key=_loss)
    assert best.metrics == lowest["metrics"]
    row = sweep.trials().loc[best.number]
    assert {name: row[name] for name in lowest["metrics"]} == lowest["metrics"]
    assert row["best_step"] == lowest["step"]


def test_curves_are_those_of_the_files(sweep: Sweep) -> None:
    frame = sweep.curves("val/loss", "train/grad_norm", "no/such")
    expected = [
        (number, name, row["step"], row["metrics"][name])
        for number in range(5)
        for name in ("val/loss", "train/grad_norm")
        for row in map(json.loads, _lines(sweep, number))
        if name in row["metrics"]
    ]
    assert list(frame.itertuples(index=False, name=None)) == expected
    curve = sweep.trial(2).curve("train/grad_norm")
    assert list(curve.items()) == [
        (step, v) for n, m, step, v in expected if (n, m[0]) == (2, "t")
    ]


def test_loaded_model_has_the_recorded_loss(sweep: Sweep) -> None:
    best = sweep.best
    model, task = best.load_model(), best.load_task()
    data = task.build_data().val
    assert isinstance(data, tuple)
    with torch.no_grad():
        loss, weight = task.loss(model, data)
    assert float(loss) / float(weight) == pytest.approx(best.value, rel=1e-5)
    assert not model.training


def test_study_takes_optunas_own_analysis(sweep: Sweep) -> None:
    import optuna

    study = sweep.study
    assert (
        study.best_trial.number
        == min(
            (t for t in sweep.study.trials if t.value is not None and t.state.name == "COMPLETE"),
            key=lambda t: t.value or 0.0,
        ).number
    )
    assert len(optuna.visualization.plot_optimization_history(study).data) > 0
    study.tell(study.ask(), 0.0)
    assert len(sweep.study.trials) == 5


def test_figures_are_those_of_the_report(sweep: Sweep) -> None:
    best = sweep.figures.history().data[-1].y
    values = list(sweep.trials().sort_index()["val/loss"])
    assert list(best) == [min(values[: count + 1]) for count in range(5)]
    for draw in (sweep.figures.curves, sweep.figures.slices, sweep.figures.timeline):
        assert len(draw().data) > 0
    for draw in (sweep.figures.contours, sweep.figures.pareto):
        with pytest.raises(NotEnough):
            draw()


@pytest.mark.chaos
def test_file_that_is_written_gives_the_same_sweep(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(sweep.to_yaml())
    again = Sweep.from_file(tmp_path / "sweep.yaml", {"name": "again"}, root=sweep.paths.root)
    assert again.to_yaml() == sweep.to_yaml().replace("name: digits", "name: again", 1)
    found = again.run().trials()
    for column in ("val/loss", "state", *SPACE):
        pd.testing.assert_series_equal(found[column], sweep.trials()[column])


@pytest.mark.chaos
@pytest.mark.parametrize("from_file", [False, True], ids=["keywords", "file"])
def test_check_says_what_auto_takes(tmp_path: Path, from_file: bool) -> None:
    keys = KEYS | {"name": "chosen", "trials": 4, "search": "auto", "early_stopping": "auto"}
    sweep = Sweep(root=tmp_path, **keys)
    if from_file:
        (tmp_path / "chosen.yaml").write_text(json.dumps(keys))
        sweep = Sweep.from_file(tmp_path / "chosen.yaml", root=tmp_path)
    checked = sweep.check()["auto"]
    assert [(one["key"], one["taken"]) for one in checked] == [
        ("search.sampler", "random"), ("early_stopping.scheduler", "asha_promote"),
    ]  # fmt: skip
    assert "all 4 trials" in checked[0]["why"]
    assert sweep.check(hours=1)["auto"][0]["taken"] == "tpe"


def _examples() -> Iterator[tuple[str, str]]:
    """Names and code of the examples in the docstrings of the public names."""
    for name in sweeps.__all__:
        public = getattr(sweeps, name)
        for member, one in [("", public), *vars(public).items()]:
            text = inspect.getdoc(one) or "" if not member.startswith("_") else ""
            if found := doctest.DocTestParser().get_examples(text):
                yield f"{name}.{member}".rstrip("."), "".join(part.source for part in found)


@pytest.mark.parametrize(("name", "code"), list(_examples()))
def test_example_of_a_docstring_runs(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    """Left out is what would start another sweep, and what needs test data, which digits lacks."""
    root = tmp_path / "runs"
    root.mkdir()
    for each in ("digits", "wider"):
        (root / each).symlink_to(sweep.paths.directory)
    (tmp_path / "sweep.yaml").write_text(sweep.to_yaml())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sweeps.api.sweep.run_command", lambda *_: None)
    checked = {"plan": {"hours": 0.1, "trials": 8}, "warnings": [], "options": []}
    monkeypatch.setattr("sweeps.api.sweep.read_command", lambda *_: checked)
    monkeypatch.setattr("sweeps.api.trial.run_command", lambda *_: None)
    tested = RecordedTest(1, 0, {"test/loss": 0.1}, 1, 1, "", 10, "cpu", "fp32")
    monkeypatch.setattr("sweeps.api.trial.read_tested", lambda _: [tested])
    monkeypatch.setattr("sweeps.api.sweep.stop", lambda _: StopResult("", None, True, "", ""))
    found = {"winner": 0, "sentences": []}
    confirmed = SimpleNamespace(as_dict=lambda: found)  # by `sweep confirm`, which trains
    monkeypatch.setattr("sweeps.api.sweep.find_confirmation", lambda _: confirmed)
    monkeypatch.setattr("sweeps.api.sweep.confirmed_trial", lambda view: view.record(0))
    exec(compile(code, name, "exec"), {"Sweep": Sweep})


_SCRIPT = """
import sys
from sweeps import Sweep
sweep = Sweep.from_file("sweep.yaml", root="runs")
try:
    sweep.run()
except KeyboardInterrupt:
    print("interrupted, and", sweep.status["state"])
"""


@pytest.fixture
def script(cli: CommandLine) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a script that runs a sweep of long trials."""
    started: list[subprocess.Popen[str]] = []
    sweep = Sweep(name="long", trials=2, root=cli.root, **KEYS | {"budget": {"epochs": 300}})
    cli.write("sweep.yaml", sweep.to_yaml())
    cli.write("script.py", _SCRIPT)

    def start() -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "script.py"],
                cwd=cli.directory,
                env=cli.environment | {"PYTHONPATH": str(cli.project)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        wait_until(lambda: len(list(cli.root.glob("long/trials/*/checkpoints/step-*"))) > 2)
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.chaos
def test_ctrl_c_drains_and_is_raised(
    cli: CommandLine, script: Callable[[], subprocess.Popen[str]]
) -> None:
    process = script()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    printed, _ = process.communicate(timeout=scaled(90))
    assert printed.endswith("interrupted, and interrupted\n")
    assert process.returncode == 0
    assert not is_held(cli.root / "long" / "lock")


@pytest.mark.chaos
def test_killed_script_takes_its_driver_with_it(
    cli: CommandLine, script: Callable[[], subprocess.Popen[str]]
) -> None:
    """The driver is dead, so the sweep can be resumed at once, and ends as if never killed."""
    process = script()
    (driver,) = psutil.Process(process.pid).children()
    process.kill()
    wait_until(lambda: not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE)
    sweep = Sweep.open("long", root=cli.root)
    assert sweep.status["state"] == "interrupted"
    sweep.resume()
    undisturbed = Sweep.from_file(
        cli.directory / "sweep.yaml", {"name": "undisturbed"}, root=cli.root
    ).run()
    for column in ("state", "val/loss", "best_step", *SPACE):
        pd.testing.assert_series_equal(sweep.trials()[column], undisturbed.trials()[column])
    expected = undisturbed.curves("train/loss", "val/loss")
    pd.testing.assert_frame_equal(sweep.curves("train/loss", "val/loss"), expected)


def _loss(row: dict[str, Any]) -> float:
    return float(row["metrics"]["val/loss"])


def _lines(sweep: Sweep, number: int) -> list[str]:
    return (sweep.trial(number).directory / "metrics.jsonl").read_text().splitlines()
