"""`sweep audit --reproduce`: a trial again, compared bit for bit with curve and checkpoints."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.ledger.attributes import PbtPerturbation
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.recording.trial_config import read_config
from sweeps.spec.spec import trial_yaml
from sweeps.trust.reproduction import Difference, first_difference
from sweeps.view.sweep_view import SweepView
from tests.message_parts import assert_parts
from tests.unit.sweeps.trained_sweep import COMPLETE, KEY, MODULE, PRUNED, RESUMED
from trainable.build import open_trainer
from trainable.checkpoint import CheckpointStore
from trainable.store.metrics_file import FILE_NAME, Row, read_rows
from trainable.store.notes import add_earlier


def _reproduce(*words: str) -> Result:
    return CliRunner().invoke(app, ["audit", "made", *words, "--reproduce"])


def _found(*words: str) -> dict[str, Any]:
    done = _reproduce(*words, "--json")
    assert done.stdout, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (0 if found["is_equal"] else 1)
    return found


def _content(paths: SweepPaths) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in paths.root.rglob("*") if path.is_file()}


def _rewrite_state(paths: SweepPaths, number: int, key: str) -> None:
    """Change the last bit of one tensor of a trial's newest checkpoint, with a valid digest."""
    store = CheckpointStore(paths.trial(number))
    newest = store.generations()[-1]
    state = store.load(newest)
    tensor = next(iter(state["model"].values()))
    tensor.flatten()[0] = torch.nextafter(tensor.flatten()[0], torch.tensor(9.0))
    shutil.rmtree(newest.path)
    config = read_config(paths.trial(number) / TRIAL_CONFIG)
    writer = CheckpointStore(paths.trial(number), config.checkpoint, metric=key, mode="min")
    writer.save(lambda: state, step=newest.step, reports=newest.epoch, final=True)


@pytest.mark.parametrize(
    ("number", "steps"),
    [(COMPLETE, 9), (PRUNED, 3), (RESUMED, 9)],
    ids=["complete", "pruned", "resumed"],
)
def test_same_trial_is_reproduced(number: int, steps: int, paths: SweepPaths) -> None:
    before = _content(paths)
    found = _found(str(number))
    assert found["is_equal"], found
    assert (found["end"], found["reached"], found["num_rows"]) == (steps, steps, steps)
    compared = [state["step"] for state in found["states"]]
    saved = CheckpointStore(paths.trial(number)).generations()
    assert compared == sorted(one.step for one in saved)
    assert compared[-1] == steps
    assert all(state["num_tensors"] > 10 for state in found["states"])
    assert _content(paths) == before


def test_best_trial_is_the_default(paths: SweepPaths) -> None:
    best = SweepView(paths).select_trial(None).number
    done = _reproduce()
    assert done.exit_code == 0
    assert_parts(done.stdout, f"trial {best} is reproduced, bit for bit", "curve: the same in 9")


def test_new_run_starts_at_a_checkpoint(paths: SweepPaths) -> None:
    with open_trainer(
        read_config(paths.trial(PRUNED) / TRIAL_CONFIG),
        paths.trial(PRUNED),
        device="cpu",
        threads=1,
        until=2,
    ) as trainer:
        assert [report.epoch for report in trainer.events()] == [2]
    before = _content(paths)
    found = _found(str(PRUNED), "--from", "1")
    assert _content(paths) == before
    assert found["started_from"] == 3
    assert found["num_rows"] == 3


def test_changed_curve_is_named(paths: SweepPaths) -> None:
    curve = paths.trial(COMPLETE) / FILE_NAME
    lines = [json.loads(text) for text in curve.read_text().splitlines()]
    lines[4]["metrics"]["train/loss"] += 1e-9
    curve.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    done = _reproduce(str(COMPLETE))
    assert done.exit_code == 1
    assert_parts(done.stdout, "differs from step 5 on", "curve: at step 5 train/loss was")
    assert _found(str(COMPLETE), "--ignore", "train/loss")["is_equal"]


def test_first_differing_tensor_is_named(paths: SweepPaths) -> None:
    _rewrite_state(paths, COMPLETE, "val/loss")
    found = _found(str(COMPLETE))
    assert found["curve"] is None
    assert found["first_step"] == 9
    state = found["states"][-1]
    assert state["first"].startswith("model.")
    assert "1 of" in state["what"]
    assert 0 < state["largest"] < 1e-6
    done = _reproduce(str(COMPLETE))
    assert_parts(done.stdout, "is not reproduced", "state at step 9", "by at most")


@pytest.mark.parametrize("key", ["accumulation", "lr"])
def test_each_configuration_is_honored(key: str, paths: SweepPaths) -> None:
    """A trial that resumed with smaller micro-batches, or with another learning rate."""
    directory = paths.trial(COMPLETE)
    first = read_config(directory / TRIAL_CONFIG)
    train = first.train.model_copy(update={"accumulation": 2})
    if key == "lr":
        optimizer = first.train.optimizer.model_copy(update={"lr": 0.07})
        train = first.train.model_copy(update={"optimizer": optimizer})
    second = first.model_copy(update={"train": train})
    shutil.rmtree(directory)
    directory.mkdir()
    stops = [False, False, False, True]
    for config in (first, second):
        with open_trainer(
            config,
            directory,
            device="cpu",
            threads=1,
            should_stop=lambda: bool(stops) and stops.pop(0),
        ) as trainer:
            if config is second:
                add_earlier(directory, trainer.resumed_at, first)
            [*trainer.events()]
    (directory / TRIAL_CONFIG).write_text(trial_yaml(second))
    found = _found(str(COMPLETE))
    assert found["is_equal"], found
    (directory / "earlier.jsonl").unlink()
    assert not _found(str(COMPLETE))["is_equal"]


def test_changed_code_and_versions_are_said(paths: SweepPaths) -> None:
    ledger = Ledger.open(paths.ledger)
    ledger.add_attempt({"gradsweep.version.torch": "1.0"})
    ledger.store_origin(type(ledger.origin)(code={f"{MODULE}.py": "0" * 64}))
    found = _found(str(PRUNED))
    assert found["code"] == [f"{MODULE}.py"]
    assert [one["what"] for one in found["machine"]] == ["torch"]


def test_lost_checkpoints_are_not_taken_for_equal(paths: SweepPaths) -> None:
    shutil.rmtree(paths.trial(PRUNED) / "checkpoints")
    found = _found(str(PRUNED))
    assert found["curve"] is None
    assert not found["is_equal"]
    assert_parts(found["not_compared"][0], "no checkpoint")


def test_damaged_checkpoint_is_not_taken_for_equal(paths: SweepPaths) -> None:
    newest = CheckpointStore(paths.trial(PRUNED)).generations()[-1]
    content = bytearray((newest.path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest.path / "state.pt").write_bytes(content)
    found = _found(str(PRUNED))
    assert found["curve"] is None
    assert not found["is_equal"]
    assert_parts(found["not_compared"][0], newest.name)
    assert "not deterministic" not in _reproduce(str(PRUNED)).stdout


LOOP = """
import time, torch

def train(config, context):
    model = torch.nn.Linear(2, 1)
    if context.restored:
        model.load_state_dict(context.restored["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.optimizer.lr)
    for epoch in context.remaining_epochs():
        loss = model(torch.randn(8, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield {"val/loss": loss.item(), "seconds": time.time()}, {"model": model.state_dict()}
"""


def test_loop_is_reproduced(paths: SweepPaths) -> None:
    Path("own_loop_again.py").write_text(LOOP)
    text = paths.spec.read_text()
    directory = paths.trial(COMPLETE)
    config = read_config(directory / TRIAL_CONFIG)
    task = config.task.model_copy(update={"name": "own_loop_again:train"})
    config = config.model_copy(update={"task": task})
    sys.path.insert(0, str(Path.cwd()))
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / TRIAL_CONFIG).write_text(trial_yaml(config))
    with open_trainer(config, directory, device="cpu", threads=1) as loop:
        [*loop.events()]
    assert paths.spec.read_text() == text
    assert _found("0")["first_step"] == 1  # a time is another one
    for words in ([], ["--from", "first"]):
        found = _found("0", "--ignore", "seconds", *words)
        assert found["is_equal"], found
        assert found["states"]
    sys.modules.pop("own_loop_again", None)


def test_member_of_a_population_is_refused(paths: SweepPaths) -> None:
    ledger, space = Ledger.open(paths.ledger), SweepView(paths).spec.space
    member = ledger.add(Suggestion({KEY: 0.02}, {KEY: space[KEY].to_optuna()})).number
    ledger.mutate(1, {member: PbtPerturbation(1, RESUMED, {KEY: 0.01})})
    done = _reproduce(str(member))
    assert (done.exit_code, done.stdout) == (2, "")
    assert_parts(done.stderr, "copied the weights of trial 2 after epoch 1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["9"], "has no trial 9"),
        (["--from", "7"], "has no such checkpoint"),
        (["--from", "newest"], "must be first, latest, best or the epoch"),
        (["--from", "latest"], "nothing is left to train"),
        (["--dir", "runs/made/again"], "lies in the directory of the sweep"),
        (["--ignore", "train/los"], "has no such metric"),
    ],
)
def test_wrong_words_are_refused(paths: SweepPaths, words: list[str], said: str) -> None:
    before = _content(paths)
    done = _reproduce(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert _content(paths) == before


@pytest.mark.usefixtures("paths")
def test_directory_of_a_killed_reproduction_is_named_with_its_remedy(tmp_path: Path) -> None:
    again = tmp_path / "a gain"
    assert _reproduce("--dir", str(again)).exit_code == 0
    done = _reproduce("--dir", str(again))  # what a killed one has left looks the same
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"repeat the command after: rm -r '{again}'" in done.stderr.replace("\n", " ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
def test_run_starts_at_no_checkpoint_of_another_user(paths: SweepPaths, tmp_path: Path) -> None:
    """Its copy would belong to this user, whose resume makes objects of what it names."""
    [first, *_] = CheckpointStore(paths.trial(COMPLETE)).generations()
    os.chown(first.path / "state.pt", 12345, 12345)
    done = _reproduce(str(COMPLETE), "--from", "first", "--dir", str(tmp_path / "new"))
    assert done.exit_code == 2
    assert_parts(done.stderr, "state.pt belongs to user 12345", "chown")
    assert not (tmp_path / "new").exists()


def test_trial_is_trained_again_in_this_process(paths: SweepPaths) -> None:
    before = _content(paths)
    words = ["train", "made", str(RESUMED), "--dir", "again"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    again = read_rows(Path("again"))
    assert [row.step for row in again] == [*range(1, 10)]
    assert first_difference(read_rows(paths.trial(RESUMED)), again) is None
    assert _content(paths) == before
    (paths.trial(RESUMED) / TRIAL_CONFIG).write_text("train: 3\n")
    for other, said in ((["-s", "trials=2"], "exclude each other"), ([], "cannot be read")):
        done = CliRunner().invoke(app, [*words, *other])
        assert (done.exit_code, done.stdout) == (2, "")
        assert said in done.stderr


def test_curves_are_compared_bit_for_bit() -> None:
    nan, measured = float("nan"), "memory/process_mb"
    trial = [Row(1, 5, {"a": 1.0}), Row(2, 6, {"a": 0.1, measured: 1.0})]
    same = [Row(1, 0, {"a": 1.0}), Row(2, 0, {"a": 0.1, measured: 2.0})]
    assert first_difference(trial, same) is None
    assert first_difference(trial, trial[:1]) is None
    value = math.nextafter(0.1, 1.0)
    other = [trial[0], Row(2, 6, {"a": value})]
    assert first_difference(trial, other) == Difference(2, "a", 0.1, value)
    assert first_difference(trial, [Row(1, 5, {}), trial[1]]) == Difference(1, "a", 1.0, None)
    assert first_difference([Row(1, 5, {"a": nan})], [Row(1, 5, {"a": nan})]) is None
    assert first_difference([], trial) is None
