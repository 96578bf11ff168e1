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
from sweeps.cli.messages import paragraph
from sweeps.cli.train import OtherRun, _RunProgress, train_once
from sweeps.paths import TRIAL_CONFIG
from sweeps.spec.spec import parse_spec
from tests.message_parts import assert_parts
from trainable.build import open_trainer
from trainable.loop import Trainer

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


def test_size_of_an_own_optimizer_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    (tmp_path / "shown_rule.py").write_text(
        "import torch\nfrom trainable.tasks.spiral import Spiral\nclass Rule(Spiral):\n"
        "    def __init__(self):\n        super().__init__(samples=20)\n"
        "    def build_optimizer(self, model, config):\n"
        "        return torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    said = io.StringIO()
    spec = parse_spec(SPEC.format(task="shown_rule:Rule", metric="val/accuracy"), "one.yaml")
    train_once(spec, None, Console(file=io.StringIO()), Console(file=said, width=300))
    assert_parts(said.getvalue(), "what the optimizer keeps", "known after its first step")
    assert "the optimizer keeps " not in said.getvalue().replace("what the optimizer keeps", "")


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


def test_number_of_a_report_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    (tmp_path / "shown_reports.py").write_text(TASKS)
    text = SPEC.format(task="shown_reports:loop", metric="score")
    spec = parse_spec(text.replace("epochs: 1", "steps: 1, report_every: 1"), "one.yaml")
    said = io.StringIO()
    train_once(spec, None, Console(file=said, width=200), Console(file=io.StringIO()))
    assert "report 1 step 1: score 0.5, epochs_alone 2\n" in said.getvalue()


def test_bar_moves_within_an_epoch(tmp_path: Path) -> None:
    spec = parse_spec(SPEC.format(task="spiral", metric="val/accuracy"), "one.yaml")
    trainer = open_trainer(spec.trial_config(0, {}), tmp_path, device="cpu")
    try:
        console = Console(file=io.StringIO(), force_terminal=True, width=100)
        bar = _RunProgress(console, trainer, spec.name, spec.budget.reports, "epoch")
        list(bar.get_renderables())
        assert (bar.tasks[0].completed, bar.tasks[0].fields["left"]) == (0, "")
        assert isinstance(trainer, Trainer)
        trainer.state.progress.since_report = trainer.plans[0].windows // 2
        list(bar.get_renderables())
        assert 0 < bar.tasks[0].completed < 1
        assert bar.tasks[0].fields["left"].endswith(" left")
    finally:
        trainer.close()


def test_lines_of_a_terminal_break_between_words() -> None:
    for is_terminal, count in ((True, 2), (False, 1)):
        said = io.StringIO()
        console = Console(file=said, force_terminal=is_terminal, width=20, color_system=None)
        paragraph(console, "val/loss 0.5, train/loss 0.25")
        assert len(said.getvalue().splitlines()) == count
        assert "train/loss" in said.getvalue()


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


def test_run_of_an_earlier_release_resumes(tmp_path: Path) -> None:
    _train(tmp_path)
    (tmp_path / TRIAL_CONFIG).unlink()
    assert len(_train(tmp_path, "budget.epochs=3", "train.optimizer.lr=0.01")[0]) == 1


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
    assert done.stderr.startswith("the checkpoint does not fit the model or the optimizer (")
    for state in kept.rglob("state.pt"):
        state.write_bytes(b"")
    done = _command(tmp_path)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 2
    (told,) = done.stderr.splitlines()
    assert "checkpoint" in told


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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("kept", [True, False])
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
