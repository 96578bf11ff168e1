"""`sweep audit --test`: one evaluation on test data, recorded once, and what it is worth."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sweeps.api.sweep import Sweep
from sweeps.artifacts.export import export_best
from sweeps.cli.app import app
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.paths import SweepPaths
from sweeps.reconcile.reconcile import MissingTests
from sweeps.reconcile.repairs import apply
from sweeps.sweep_lock import SweepLock
from sweeps.view.sweep_view import SweepView
from tests.memory_recorder import MemoryRecorder
from tests.message_parts import assert_parts
from tests.unit.sweeps.trained_sweep import KEY, MODULE, TASK, copy_of, trained
from tracking.outbox_status import read_outbox
from trainable.store.generations import STATE
from trainable.store.notes import TESTED, read_tested

BEST, OTHER = 1, 0


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished sweep with two trials; the second is the best."""
    with trained(tmp_path_factory.mktemp("template"), [1e-3, 3e-2]) as here:
        yield here


@pytest.fixture
def paths(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepPaths:
    """A copy of it, in the working directory, whose task is not imported yet."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return copy_of(template, tmp_path / "here", monkeypatch)


def _run(*words: str, offline: bool = True) -> Result:
    return CliRunner().invoke(app, ["audit", "made", *words, "--test", *["--offline"] * offline])


def _json(*words: str) -> dict[str, Any]:
    done = _run(*words, "--json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def _refused(*words: str, code: int = 2) -> str:
    before = _contents(Path("runs"))
    done = _run(*words)
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    after = _contents(Path("runs"))
    lock = Path("runs/made/lock")
    assert {**after, lock: b""} == {**before, lock: b""}
    return done.stderr


def test_best_is_evaluated_and_recorded_once(paths: SweepPaths) -> None:
    found = _json()
    assert (found["trial"], found["is_new"], found["cautions"]) == (BEST, True, [])
    assert found["metrics"].keys() == {"test/loss", "test/accuracy"}
    record = SweepView(paths).record(BEST)
    assert (found["checkpoint_step"], found["num_samples"]) == (record.best_step, 15)
    (recorded,) = read_tested(paths.trial(BEST))
    assert recorded.metrics == found["metrics"]
    queued = read_outbox(paths.outbox)
    steps = {n: marks.steps.get("test/loss") for n, marks in queued.marks.items()}
    assert steps == {BEST: record.best_step}

    before = _contents(paths.directory)
    again = _json()
    assert (again["is_new"], again["num_evaluations"], again["metrics"]) == (
        False,
        1,
        found["metrics"],
    )
    assert _contents(paths.directory) == before
    assert_parts(_run().stdout, f"trial {BEST} on test data", "recorded 20", "--again")


def test_repeated_evaluation_is_recorded_later(paths: SweepPaths) -> None:
    first = _json()
    again = _json("--again")
    assert again["metrics"] == first["metrics"]
    assert (again["num_evaluations"], again["step"]) == (2, first["step"] + 1)
    assert len(again["cautions"]) == 1
    assert_parts(again["cautions"][0], "2 times")
    assert read_outbox(paths.outbox).marks[BEST].steps["test/loss"] == again["step"]


def test_other_trial_is_selection(paths: SweepPaths) -> None:
    _json()
    (caution,) = _json(str(OTHER))["cautions"]
    assert_parts(caution, f"trial {OTHER} is not the best trial (trial {BEST}", "selection")
    (caution,) = _json()["cautions"]
    assert_parts(caution, f"trial {OTHER} of this sweep was tested, too", "selection")
    assert len(read_tested(paths.trial(BEST))) == 1


def test_values_are_shown_everywhere(paths: SweepPaths, tmp_path: Path) -> None:
    value = _json()["metrics"]["test/loss"]
    shown = f"test/loss {value:.4g}"
    for words in (["status", "made"], ["best", "made"]):
        assert shown in CliRunner().invoke(app, words).stdout
    page = CliRunner().invoke(app, ["show", "made", str(BEST)]).stdout
    assert f"{value:.4g}" in page.partition("test/loss")[2].partition("\n")[0]
    trials = json.loads(CliRunner().invoke(app, ["trials", "made", "--json"]).stdout)
    assert [bool(one["test"]) for one in trials] == [False, True]
    export_best(SweepView(paths), tmp_path / "export")
    card = (tmp_path / "export" / "model_card.md").read_text()
    assert f"On 15 test samples, which no trial used, it has {shown}" in card
    sweep = Sweep.open("made", root=paths.root)
    assert sweep.best.metrics["test/loss"] == value
    assert sweep.trials()["test/loss"].to_dict() == pytest.approx(
        {BEST: value, OTHER: float("nan")}, nan_ok=True
    )


def test_running_sweep_is_refused(paths: SweepPaths) -> None:
    lock = SweepLock(paths.lock)
    lock.acquire()
    assert "is already being run by" in _refused(code=4)
    lock.release()


def test_damaged_checkpoint_is_not_evaluated(paths: SweepPaths) -> None:
    for state in (paths.trial(BEST) / "checkpoints").rglob(STATE):
        state.write_bytes(b"?" * state.stat().st_size)
    assert "no valid checkpoint" in _refused(code=3)


@pytest.mark.usefixtures("paths")
def test_task_without_test_data_is_told_the_line() -> None:
    text = TASK.replace("class Arms", "class WithTest").replace(
        "class Untested(Arms)", "class Arms(WithTest)"
    )
    Path(f"{MODULE}.py").write_text(text)
    assert_parts(_refused(), "Arms.build_data() gives no test data", "test=(inputs, targets))")


@pytest.mark.usefixtures("paths")
def test_changed_data_are_refused_unless_accepted() -> None:
    Path(f"{MODULE}.py").write_text(TASK.replace("width=8", "width=8, noise=0.3"))
    assert_parts(_refused(), "builds something else", "train: tensor 0", "--accept-changes")
    found = _json("--accept-changes")
    assert_parts(found["cautions"][0], "code has changed", f"{MODULE}.py")


def test_unfinished_trial_is_refused(paths: SweepPaths) -> None:
    ledger = Ledger.open(paths.ledger)
    space = SweepView(paths).spec.space
    number = ledger.add(Suggestion({KEY: 0.01}, {KEY: space[KEY].to_optuna()})).number
    ledger.report(number, epoch=1, step=3, value=9.0)
    assert_parts(_refused(str(number)), f"trial {number} has not ended", "resume")
    (caution,) = _json()["cautions"]
    assert_parts(caution, "1 trial of this sweep", "may change")


def test_damaged_record_is_named(paths: SweepPaths) -> None:
    (paths.trial(BEST) / TESTED).write_text("{")
    assert_parts(_refused(), f"{TESTED} is damaged", "remove it")
    assert CliRunner().invoke(app, ["show", "made", str(BEST)]).exit_code == 0


def test_value_that_was_not_queued_is_sent_again(paths: SweepPaths) -> None:
    """The process may be killed between its two writes."""
    _json()
    shutil.rmtree(paths.outbox)
    (value,) = read_tested(paths.trial(BEST))
    missing = [one for one in SweepView(paths).corrections() if isinstance(one, MissingTests)]
    assert missing == [MissingTests(BEST, (value.row,))]
    recorder = MemoryRecorder()
    view = SweepView(paths)
    for _ in range(2):
        apply(view.corrections(), paths, view.spec, Ledger.open(paths.ledger), recorder)
    points = recorder.runs[BEST].points
    assert {key: v for key, v in points.items() if key[0].startswith("test/")} == {
        (name, value.step): one for name, one in value.metrics.items()
    }
    assert _json()["is_new"] is False  # only queued
    assert read_outbox(paths.outbox).marks[BEST].steps["test/loss"] == value.step
