"""Missing files of a sweep are named, and nothing is created in their place."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sweeps.cli import messages
from sweeps.cli.app import app
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.checkpoint import CheckpointStore
from trainable.config import CheckpointConfig

COMMANDS = ["status", "trials", "best", "resume", "stop"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("sweep.yaml", ["has lost its sweep.yaml", "ledger.db and trials are left"]),
        ("ledger.db", ["there is no ledger at", "1 trial directories", "restore it"]),
    ],
)
def test_missing_and_remaining_files_are_named(
    tmp_path: Path, command: str, lost: str, said: list[str]
) -> None:
    sweep = MadeSweep(tmp_path)
    sweep.paths.trial(sweep.add(None, 0.5)).mkdir(parents=True, exist_ok=True)
    for file in sweep.paths.directory.glob(f"{lost}*"):
        file.unlink()
    before = sorted(sweep.paths.directory.rglob("*"))
    done = CliRunner().invoke(app, [command, "small", "--root", str(tmp_path)])
    assert done.exit_code == 2
    words = " ".join(done.output.split())
    assert all(sentence in words for sentence in said), words
    assert sorted(sweep.paths.directory.rglob("*")) == before


@pytest.mark.parametrize(
    ("ending", "lost", "said"),
    [
        (None, ".", "trial 0 starts again: its directory is lost"),
        (None, "checkpoints", "trial 0 starts again: its checkpoints are lost"),
        (None, "metrics.jsonl", "trial 0 resumes, but its earlier metrics are lost"),
        (
            "complete",
            ".",
            "trial 0 has ended and keeps its result, but its metrics and checkpoints are lost",
        ),
        (None, None, None),
    ],
)
def test_files_missing_from_a_trial_are_named_at_opening(
    tmp_path: Path, ending: Any, lost: str | None, said: str | None
) -> None:
    sweep = MadeSweep(tmp_path)
    directory = sweep.paths.trial(sweep.add(ending, 0.5))
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "metrics.jsonl").touch()
    if lost is not None:
        place = directory / lost
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    nobody: Any = None
    opened = sweep.session(nobody)
    sentences = list(opened._lost_files())
    assert len(sentences) == (said is not None)
    assert said is None or sentences[0].startswith(said)


def _with_checkpoints(root: Path, *values: float) -> tuple[MadeSweep, list[Path]]:
    """A sweep whose one trial is complete, with a checkpoint of each report."""
    sweep = MadeSweep(root)
    number = sweep.add("complete", *values)
    directory = sweep.paths.trial(number)
    directory.mkdir(parents=True)
    store = CheckpointStore(directory, CheckpointConfig(keep=len(values)), metric="val/loss")
    for epoch, value in enumerate(values, start=1):
        store.save(
            lambda: {"step": torch.ones(())},
            step=epoch * 10,
            reports=epoch,
            value=value,
        )
    store.close()
    return sweep, [Path(one.address) for one in CheckpointStore(directory).generations()]


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ([], None),
        ([0], None),
        (
            [1],
            "trial 0's best value, 0.25, is missing; the best remaining one has 0.5",
        ),
        ([0, 1], "there is no valid checkpoint with a value at"),
    ],
)
@pytest.mark.parametrize("damaged", [False, True])
def test_missing_weights_are_not_offered(
    tmp_path: Path, lost: list[int], said: str | None, damaged: bool
) -> None:
    sweep, generations = _with_checkpoints(tmp_path, 0.5, 0.25)
    for place in lost:
        if damaged:
            (generations[place] / "state.pt").write_bytes(b"damaged")
        else:
            shutil.rmtree(generations[place])

    done = CliRunner().invoke(app, ["best", "small", "--root", str(tmp_path)])
    words = " ".join(done.output.split())
    assert ("no weights to export: " in words) is (said is not None), words
    assert said is None or said in words
    assert (f"checkpoint: {generations[1]}".replace(" ", "") in "".join(words.split())) is (
        said is None
    )

    offered = None if 1 in lost else str(generations[1])
    for command in (["show", "small", "0"], ["trials", "small"]):
        done = CliRunner().invoke(app, [*command, "--json", "--root", str(tmp_path)])
        shown = json.loads(done.stdout)
        trial = shown[0] if isinstance(shown, list) else shown
        assert damaged or trial["best_checkpoint"] == offered  # to look reads no digest

    outcome, told = sweep.view.outcome(), (io.StringIO(), io.StringIO())
    messages.outcome(*(Console(file=file, width=500) for file in told), outcome, sweep.paths)
    printed, warned = (file.getvalue() for file in told)
    assert ("--export" in printed) is (said is None)
    assert said is None or ("there are no best weights to export: " in warned and said in warned)

    if said is not None:
        export = ["best", "small", "--root", str(tmp_path), "--export", str(tmp_path / "there")]
        done = CliRunner().invoke(app, export)
        assert done.exit_code == 3
        assert said in " ".join(done.output.split())
        assert not (tmp_path / "there").exists()
