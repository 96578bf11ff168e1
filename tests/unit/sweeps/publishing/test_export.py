"""The export process, when it gives no answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sweeps.errors import NoReport
from sweeps.publishing.export import draw_report, export_best
from sweeps.results.sweep_status import NoBest
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
    store.maybe_save(lambda: state, step=1, epoch=1, value=0.5, final=True)
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
