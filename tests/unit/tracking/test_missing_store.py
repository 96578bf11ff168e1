"""Whether a store's file is still the one that holds a sweep's runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tracking.probe import is_gone


def _make(file: Path, runs: Sequence[str] | None) -> str:
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("CREATE TABLE experiments (experiment_id INTEGER)")
        if runs is not None:
            db.execute("CREATE TABLE runs (run_uuid TEXT PRIMARY KEY)")
            db.executemany("INSERT INTO runs VALUES (?)", [(run,) for run in runs])
    return f"sqlite:///{file}"


@pytest.mark.parametrize(
    ("runs", "gone"),
    [
        pytest.param(["x", "b"], False, id="one of ours is there"),
        pytest.param(["x"], True, id="of another sweep"),
        pytest.param([], True, id="new"),
        pytest.param(None, True, id="without tables"),
    ],
)
def test_store_file_is_recognised_by_our_runs(
    tmp_path: Path, runs: Sequence[str] | None, gone: bool
) -> None:
    assert is_gone(_make(tmp_path / "mlflow.db", runs), ["a", "b"]) is gone


def test_missing_file_is_missing(tmp_path: Path) -> None:
    assert is_gone(f"sqlite:///{tmp_path}/mlflow.db", ["a"])
    assert not list(tmp_path.iterdir())


def test_unreadable_file_counts_as_present(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    file.write_bytes(b"no database" * 100)
    assert not is_gone(f"sqlite:///{file}", ["a"])
    uri = _make(tmp_path / "locked.db", [])
    with closing(sqlite3.connect(tmp_path / "locked.db")) as db:
        db.execute("BEGIN EXCLUSIVE")
        assert not is_gone(uri, ["a"], seconds=0.1)


def test_server_store_is_unknown() -> None:
    assert not is_gone("http://127.0.0.1:1", ["a"])
