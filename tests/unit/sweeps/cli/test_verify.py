"""`sweep audit --files`: a sound sweep passes, and each damaged record is named."""

from __future__ import annotations

import json
import shutil
import sqlite3
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.sweep_lock import SweepLock
from tests.message_parts import assert_parts
from tests.unit.sweeps.trained_sweep import COMPLETE, PRUNED, RESUMED
from trainable.checkpoint import CheckpointStore
from trainable.store.metrics_file import FILE_NAME, read_rows


@pytest.fixture(scope="module")
def template(template: Path) -> Path:
    """A finished sweep whose records are all delivered to the embedded tracking store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(template)
        patch.setattr("sys.path", [*sys.path, str(template)])
        assert CliRunner().invoke(app, ["sync", "made"]).exit_code == 0
    return template


def _verify() -> dict[str, Any]:
    done = CliRunner().invoke(app, ["audit", "made", "--files", "--json"])
    assert done.stdout, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (0 if found["is_sound"] else 1)
    assert found["is_sound"] is not bool(found["contradictions"])
    return found


def _content(paths: SweepPaths) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in paths.root.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


def _flip(file: Path, after: bytes, offset: int = 0) -> None:
    """Flip one bit of the byte that follows `after`."""
    content = bytearray(file.read_bytes())
    content[content.index(after) + len(after) + offset] ^= 1
    file.write_bytes(content)


def _flip_value(file: Path, value: float) -> None:
    """Flip the last bit of a number in a database."""
    stored = struct.pack(">d", value)
    content = bytearray(file.read_bytes())
    content[content.index(stored) + 7] ^= 1
    file.write_bytes(content)


def _last_loss(paths: SweepPaths, number: int) -> float:
    return read_rows(paths.trial(number))[-1].metrics["val/loss"]


def _newest(paths: SweepPaths, number: int) -> Path:
    return CheckpointStore(paths.trial(number)).generations()[-1].path


def test_sound_sweep_passes(paths: SweepPaths) -> None:
    before = _content(paths)
    found = _verify()
    assert found == {
        "is_sound": True,
        "contradictions": [],
        "checked": found["checked"],
        "notes": found["notes"],
    }
    assert len(found["checked"]) == 4
    (note,) = found["notes"]  # the template was copied
    assert_parts(note, "the root was at ", "corrected by: ", "sync made")
    assert _content(paths) == before
    done = CliRunner().invoke(app, ["audit", "made", "--files"])
    assert_parts(done.stdout, "sweep 'made' is sound", "compared: ", "4 runs in the tracking")


DAMAGES: dict[str, tuple[Callable[[SweepPaths], None], str, str]] = {
    "ledger value": (
        lambda paths: _flip_value(paths.ledger, _last_loss(paths, COMPLETE)),
        "trial 0",
        "reports give",
    ),
    "ledger page": (lambda paths: _flip(paths.ledger, b"SQLite "), "ledger", "not a database"),
    "curve value": (
        lambda paths: _flip(paths.trial(PRUNED) / FILE_NAME, b'"val/loss": ', 3),
        "trial 1",
        "in the ledger, 1.",
    ),
    "curve step": (
        lambda paths: _flip(paths.trial(COMPLETE) / FILE_NAME, b'{"step": 2', -1),
        "trial 0",
        "after step",
    ),
    "curve line": (
        lambda paths: _flip(paths.trial(COMPLETE) / FILE_NAME, b'{"step'),
        "trial 0",
        "metrics.jsonl is damaged",
    ),
    "configuration": (
        lambda paths: _flip(paths.trial(RESUMED) / TRIAL_CONFIG, b"lr: 0.0"),
        "trial 2",
        "train.optimizer.lr",
    ),
    "state": (
        lambda paths: _flip(_newest(paths, COMPLETE) / "state.pt", b"PK", 200),
        "trial 0",
        "has sha256",
    ),
    "older state": (
        lambda paths: _flip(
            CheckpointStore(paths.trial(RESUMED)).generations()[0].path / "state.pt", b"PK", 200
        ),
        "trial 2",
        "has sha256",
    ),
    "manifest": (
        lambda paths: _flip(_newest(paths, COMPLETE) / "manifest.json", b'"value": '),
        "trial 0",
        "manifest.json",
    ),
    "built": (
        lambda paths: _flip(paths.trial(COMPLETE) / "built.json", b"{", -1),
        "trial 0",
        "built.json is damaged",
    ),
    "resumptions": (
        lambda paths: _flip(paths.trial(RESUMED) / "resumed.json", b"[", -1),
        "trial 2",
        "resumed.json is damaged",
    ),
    "outbox": (
        lambda paths: _flip(paths.outbox / "outbox.db", b"SQLite "),
        "outbox",
        "is damaged",
    ),
    "store page": (
        lambda paths: _flip(paths.root / "mlflow.db", b"SQLite "),
        "tracking store",
        "is damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_one_flipped_bit_is_named(name: str, paths: SweepPaths) -> None:
    damage, where, what = DAMAGES[name]
    damage(paths)
    before = _content(paths)
    found = _verify()["contradictions"]
    assert where in {one["where"] for one in found}, found
    assert any(what in one["what"] for one in found), found
    assert all(one["remedy"] for one in found)
    assert {one["where"] for one in found} <= {where, "outbox", "tracking store"}
    assert _content(paths) == before


@pytest.mark.parametrize("name", ["earlier.jsonl", "logged.jsonl", "noted.json", "test.jsonl"])
def test_small_file_of_a_trial_is_read(name: str, paths: SweepPaths) -> None:
    (paths.trial(COMPLETE) / name).write_text('{"a": 1\n')
    (found,) = _verify()["contradictions"]
    assert found["file"] == str(paths.trial(COMPLETE) / name)
    assert name in found["what"]


def _change_store(paths: SweepPaths, statement: str) -> None:
    with sqlite3.connect(paths.root / "mlflow.db") as db:
        assert db.execute(statement).rowcount
    db.close()


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE latest_metrics SET value = value + 1 WHERE key = 'val/loss'", "last value of"),
        ("UPDATE runs SET status = 'RUNNING' WHERE status = 'FINISHED'", "another status"),
        ("DELETE FROM metrics WHERE key = 'val/loss' AND step = 3", "lacks 1 metric value"),
        ("DELETE FROM params WHERE key = 'train.optimizer.lr'", "lacks 1 parameter"),
    ],
)
def test_other_content_of_the_store_is_named(statement: str, what: str, paths: SweepPaths) -> None:
    _change_store(paths, statement)
    found = _verify()["contradictions"]
    assert {one["where"] for one in found} == {"tracking store"}
    assert any(what in one["what"] for one in found)


def test_second_run_of_a_trial_is_named(paths: SweepPaths) -> None:
    with sqlite3.connect(paths.root / "mlflow.db") as db:
        (run,) = db.execute(
            "SELECT run_uuid FROM tags WHERE key = 'gradsweep.trial' AND value = '1'"
        ).fetchone()
        names = [row[1] for row in db.execute("PRAGMA table_info(runs)")]
        another = f"'{'0' if run[0] == 'f' else 'f'}' || substr(run_uuid, 2)"
        taken = ", ".join(another if name == "run_uuid" else name for name in names)
        db.execute(f"INSERT INTO runs SELECT {taken} FROM runs WHERE run_uuid = ?", (run,))
        db.execute(
            f"INSERT INTO tags SELECT key, value, {another} FROM tags WHERE run_uuid = ?",
            (run,),
        )
    db.close()
    found = _verify()["contradictions"]
    assert any("trial 1 has 2 runs" in one["what"] for one in found), found


def test_lost_checkpoints_and_strangers_are_named(paths: SweepPaths) -> None:
    shutil.rmtree(paths.trial(COMPLETE) / "checkpoints")
    (paths.trial(PRUNED) / TRIAL_CONFIG).unlink()
    found = _verify()["contradictions"]
    assert [one["where"] for one in found] == ["trial 0", "trial 1"]
    assert "no valid checkpoint" in found[0]["what"]
    assert f"{TRIAL_CONFIG} is missing" in found[1]["what"]


def test_unknown_directory_is_named(paths: SweepPaths) -> None:
    paths.trial(7).mkdir()
    (found,) = _verify()["contradictions"]
    assert_parts(found["what"], "trials/0007 belongs to no trial")


def test_spec_without_a_valid_revision_is_refused(paths: SweepPaths) -> None:
    _flip(paths.spec, b"trials: ")
    done = CliRunner().invoke(app, ["audit", "made", "--files"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert_parts(done.stderr, "sweep.yaml has no valid revision")


def test_damaged_later_revision_is_named(paths: SweepPaths) -> None:
    paths.spec.write_bytes(paths.spec.read_bytes() + b"---\n# format 2, revision 2\n")
    (found,) = _verify()["contradictions"]
    assert found["where"] == "sweep.yaml"


def test_running_sweep_is_not_compared(paths: SweepPaths) -> None:
    lock = SweepLock(paths.lock)
    lock.acquire()
    try:
        done = CliRunner().invoke(app, ["audit", "made", "--files"])
    finally:
        lock.release()
    assert (done.exit_code, done.stdout) == (2, "")
    assert "its files change" in done.stderr
