"""What MLflow's fluent API does on a further rank of a trial: nothing that lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.engine import process_cleanup
from sweeps.engine.fluent_mlflow import RunIgnorer


def test_artifacts_of_a_rank_go_with_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_cleanup, "_PLACE", tmp_path)
    token = "0123456789abcdef" * 2
    monkeypatch.setenv(process_cleanup.TOKEN_VARIABLE, token)
    scratch = process_cleanup.scratch_directory(token)
    scratch.mkdir()
    directory = RunIgnorer().directory()
    assert directory is not None
    assert directory.is_dir()
    assert directory.parent == scratch
