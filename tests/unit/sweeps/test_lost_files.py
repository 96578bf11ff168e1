"""What of a sweep is gone is said by name, with what is left, and nothing is made in its place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sweeps.cli import app
from sweeps.driver.opening import OpenSweep
from tests.unit.sweeps.made_sweep import MadeSweep

COMMANDS = ["status", "trials", "best", "resume", "stop"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("sweep.yaml", ["has lost its sweep.yaml", "ledger.db and trials are left"]),
        ("ledger.db", ["there is no ledger at", "1 trial directories", "restore it"]),
    ],
)
def test_what_is_gone_and_what_is_left_is_said(
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
        (None, ".", "trial 0 begins again: its directory is gone"),
        (None, "checkpoints", "trial 0 begins again: its checkpoints are gone"),
        (None, "metrics.jsonl", "trial 0 goes on, and the curve before that is gone"),
        ("complete", ".", "trial 0 keeps its end, and its curve and checkpoints are gone"),
        (None, None, None),
    ],
)
def test_what_a_trial_lost_is_said_when_the_sweep_is_opened(
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
    opened = OpenSweep(sweep.paths, sweep.spec, sweep.ledger, nobody, nobody)
    sentences = list(opened._lost_files())
    assert len(sentences) == (said is not None)
    assert said is None or sentences[0].startswith(said)
