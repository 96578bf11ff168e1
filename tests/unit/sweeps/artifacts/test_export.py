"""The export process, when it gives no answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sweeps.artifacts import export
from sweeps.artifacts.export import draw_report, export_best
from sweeps.errors import NoReport
from sweeps.view.sweep_view import NoBest
from tests.unit.sweeps.kill_at import kill_at
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.checkpoint import CheckpointStore
from trainable.config import CheckpointConfig
from trainable.errors import StorageError


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    sweep = MadeSweep(tmp_path)
    number = sweep.add("complete", 0.5)
    directory = sweep.paths.trial(number)
    store = CheckpointStore(directory, CheckpointConfig(), metric="val/loss")
    state = {"weights": torch.ones(2)}
    store.save(lambda: state, step=1, reports=1, value=0.5, final=True)
    (directory / "config.yaml").write_text("{}")
    return sweep


@pytest.mark.parametrize(
    ("end", "error", "told"),
    [
        ("kill -9 $$", StorageError, "its process was ended by SIGKILL, probably because the"),
        ("exit 9", NoBest, "its process ended with exit code 9"),
        ("echo cause >&2; exit 1", NoBest, "cause"),
        (r"printf 'no text: \377' >&2; exit 1", NoBest, "no text"),
    ],
)
def test_failed_export_process_is_reported(
    sweep: MadeSweep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    error: type[Exception],
    told: str,
) -> None:
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\n{end}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(error, match=told):
        export_best(sweep.view, tmp_path / "best")
    with pytest.raises(NoReport, match=told):
        draw_report(sweep.paths, tmp_path / "report.html")


FILES = ["config.yaml", "model.safetensors", "model_card.md"]


def _write_files(*arguments: Any) -> list[Path]:
    """Stand in for the export process, which needs seconds."""
    directory = arguments[3]
    for name in FILES:
        (directory / name).write_text("whole")
    return [directory / name for name in FILES]


@pytest.mark.parametrize("num_moved", range(len(FILES)))
def test_killed_export_is_repeated(
    sweep: MadeSweep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_moved: int,
) -> None:
    target = tmp_path / "best"
    monkeypatch.setattr(export, "export_trial", _write_files)
    kill_at(monkeypatch, Path, "rename", num_moved, lambda: export_best(sweep.view, target))
    assert list(target.glob(".export-*")), "nothing says that it is unfinished"
    assert export_best(sweep.view, target) == [target / name for name in FILES]
    assert sorted(path.name for path in target.iterdir()) == FILES
    with pytest.raises(FileExistsError, match="is not empty"):
        export_best(sweep.view, target)


def test_files_of_the_user_beside_an_unfinished_export_stay(
    sweep: MadeSweep, tmp_path: Path
) -> None:
    target = tmp_path / "best"
    (target / ".export-1").mkdir(parents=True)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        export_best(sweep.view, target)
    assert (target / "notes.txt").read_text() == "mine"


def test_failed_export_leaves_its_directory_empty(
    sweep: MadeSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NoBest):
        export_best(sweep.view, tmp_path / "best")
    assert not list((tmp_path / "best").iterdir())
