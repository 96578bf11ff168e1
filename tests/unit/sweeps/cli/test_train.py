"""`sweep train`: one run without Ray."""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import typer
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.cli.train import OtherRun, train_once
from sweeps.paths import TRIAL_CONFIG
from sweeps.spec.spec import parse_spec
from tests.message_parts import assert_parts

SPEC = "name: one\ntask: {task}\nmetric: {metric}\nmode: max\ntrials: 1\nbudget: {{epochs: 1}}\n"
TASKS = """
from trainable.tasks.spiral import Spiral

class Heard(Spiral):
    def __init__(self):
        super().__init__(samples=20)

    def evaluate(self, model, batches):
        return {**super().evaluate(model, batches), "snr": 7.5}

def loop(config, context):
    yield {"epochs_alone": 2.0, "score": 0.5}
"""


@pytest.mark.parametrize(
    ("task", "metric", "shown"),
    [
        ("loop", "score", "score 0.5, epochs_alone 2"),
        ("Heard", "val/snr", "val/snr 7.5, train/loss"),
    ],
)
def test_metric_is_shown_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, metric: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    module = f"shown_{task.lower()}"
    (tmp_path / f"{module}.py").write_text(TASKS)
    spec = parse_spec(SPEC.format(task=f"{module}:{task}", metric=metric), "one.yaml")
    said = io.StringIO()
    train_once(spec, None, Console(file=said, width=200), Console(file=io.StringIO()))
    (line,) = (line for line in said.getvalue().splitlines() if line.startswith("epoch 1"))
    assert line.partition(": ")[2].startswith(shown)


def test_caution_is_printed_once_as_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    method = "    def build_model(self):\n        return super().build_model().eval()\n"
    text = "from trainable.tasks.spiral import Spiral\nclass Quiet(Spiral):\n" + method
    (tmp_path / "shown_quiet.py").write_text(text)
    (tmp_path / "one.yaml").write_text(
        SPEC.format(task="shown_quiet:Quiet", metric="val/accuracy")
    )
    done = CliRunner().invoke(app, ["train", "one.yaml"])
    assert done.exit_code == 0, done.output
    assert " ".join(done.stderr.split()).count("in evaluation mode, and it is trained") == 1
    assert not [one for one in recwarn if "in evaluation mode" in str(one.message)]


SMALL = """
name: small
task: {name: spiral, samples: 16}
metric: val/loss
mode: min
trials: 1
budget: {epochs: 2}
"""


def _train(directory: Path, *overrides: str) -> tuple[list[str], list[str]]:
    """Return what a run in a directory showed, and what it said beside."""
    shown, said = io.StringIO(), io.StringIO()
    spec = parse_spec(SMALL, "small.yaml", overrides)
    train_once(spec, directory, Console(file=shown, width=200), Console(file=said, width=200))
    return shown.getvalue().splitlines(), said.getvalue().splitlines()


def test_run_resumes_only_with_its_own_settings(tmp_path: Path) -> None:
    kept = tmp_path / "td"
    began, said = _train(kept)
    assert len(began) == 2
    assert not any("td: " in line for line in said)
    others = ("train.optimizer.name=sgd", "metric=val/accuracy", "mode=max", "seed=3")
    with pytest.raises(OtherRun) as refused:
        _train(kept, *others)
    assert re.fullmatch(
        re.escape(f"{kept} holds a run with another configuration: ")
        + "metric: val/loss -> val/accuracy, mode: min -> max, train.optimizer.name: adamw -> "
        "sgd, and [0-9]+ more; a run resumes only with the configuration it began with; choose "
        "another directory with --dir",
        str(refused.value),
    )
    with pytest.raises(OtherRun, match=r": task\.samples: 16 -> 20; a run resumes only"):
        _train(kept, "task.samples=20")
    shown, said = _train(kept, "checkpoint.keep=3")
    assert shown == began[1:]
    assert f"{kept}: this run is complete; nothing to train" in said
    shown, said = _train(kept, "budget.epochs=3")
    assert [line.partition(":")[0] for line in shown] == ["epoch 3 step 3"]
    assert f"{kept}: resumes at step 2 of 3" in said


def test_run_without_a_checkpoint_accepts_other_settings(tmp_path: Path) -> None:
    _train(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    assert len(_train(tmp_path, "train.optimizer.lr=0.01")[0]) == 2


def test_file_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / TRIAL_CONFIG
    mine.write_text(SMALL)
    with pytest.raises(OtherRun) as refused:
        _train(tmp_path)
    assert_parts(str(refused.value), str(mine), "directory with --dir")
    assert mine.read_text() == SMALL


def _command(directory: Path, *overrides: str) -> Result:
    (directory / "small.yaml").write_text(SMALL)
    words = ["train", str(directory / "small.yaml"), "--dir", str(directory / "td")]
    return CliRunner().invoke(
        app, [*words, *(word for override in overrides for word in ("-s", override))]
    )


def test_unresumable_run_is_reported_without_traceback(tmp_path: Path) -> None:
    kept = tmp_path / "td"
    _train(kept)
    (kept / TRIAL_CONFIG).unlink()
    done = _command(tmp_path, "task.width=4")
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 2
    assert "\nthe checkpoint does not fit the model or the optimizer (" in done.stderr
    for state in kept.rglob("state.pt"):
        state.write_bytes(b"")
    done = _command(tmp_path)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 2
    assert "checkpoint" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.optimizer.lr=1e30", "train.clip.max_norm=null"], "the loss is nan at step "),
        (["task.name=broken:broken", "metric=score"], "score is nan in report 1; "),
    ],
)
def test_failed_training_is_reported_without_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    Path("broken.py").write_text("def broken(config, context):\n    yield {'score': float('nan')}")
    done = _command(tmp_path, "train.optimizer.name=sgd", "budget.epochs=9", *overrides)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 3
    assert done.stderr.splitlines()[-1].startswith(told)


SIGNALLED = """
import os, signal
from trainable.tasks.spiral import Spiral

class Signalled(Spiral):
    def __init__(self):
        super().__init__(samples=200)
        self.steps = 0

    def loss(self, model, batch):
        self.steps += 1
        if self.steps == 3:
            os.kill(os.getpid(), signal.{name})
        return super().loss(model, batch)
"""


@pytest.mark.parametrize(
    ("name", "kept"), [("SIGINT", True), ("SIGTERM", False), ("SIGHUP", True)]
)
def test_signal_saves_the_run_and_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kept: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    directory = tmp_path / "run" if kept else None
    monkeypatch.setattr(
        "sys.argv", ["sweep", "train", "a b.yaml", *(["--dir", "run"] if kept else [])]
    )
    module = f"signalled_{name.lower()}_{kept}".lower()
    (tmp_path / f"{module}.py").write_text(SIGNALLED.format(name=name))
    text = SPEC.format(task=f"{module}:Signalled", metric="val/accuracy")
    spec = parse_spec(text + "train: {batch_size: 20}\n", "one.yaml")
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    said = io.StringIO()
    with pytest.raises(typer.Exit) as ended:
        train_once(spec, directory, Console(file=io.StringIO()), Console(file=said, width=300))
    assert ended.value.exit_code == 128 + signal.Signals[name]
    assert f"{name}: saving after this step; once more ends at once" in said.getvalue()
    assert handlers == [
        signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
    last = said.getvalue().splitlines()[-1]
    if not kept:
        assert last.startswith(f"ended by {name}; nothing is kept without --dir")
        assert last.endswith("sweep train 'a b.yaml' --dir DIR")
        return
    assert last.startswith(f"ended by {name}; saved at step 3 in {directory}; continue with: ")
    assert last.endswith("sweep train 'a b.yaml' --dir run")
    again = io.StringIO()
    train_once(spec, directory, Console(file=io.StringIO()), Console(file=again, width=300))
    assert "resumes at step 3 of " in again.getvalue()
