"""Attempts that fail: exit code, cause, and the resume command."""

from __future__ import annotations

import errno
import io
import os
import sqlite3
import uuid
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.cli.run_console import report_error
from sweeps.engine import local_ray
from sweeps.engine.resources import Machine
from sweeps.errors import HELD, NO_SUCCESS, WRONG_INPUT, LedgerBusy, LedgerError, LockLost
from sweeps.ledger.sqlite import LedgerFile
from sweeps.paths import SweepPaths
from sweeps.sweep_lock import lock_lost
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox_file import OutboxError


def _end(error: LedgerError | LockLost | OSError, paths: SweepPaths) -> tuple[int, list[str]]:
    said = io.StringIO()
    code = report_error(error, paths, Console(file=said, width=20))
    return code, said.getvalue().splitlines()


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    made = SweepPaths(tmp_path, "digits")
    made.directory.mkdir()
    return made


def _failures(paths: SweepPaths) -> list[LedgerError | OSError]:
    """A storage that fails under the ledger, the outbox and any other file of a sweep."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(paths.trial(0) / "config.yaml"))
    return [
        LedgerFile(paths.ledger).refusal(sqlite3.OperationalError("database or disk is full")),
        LedgerFile(paths.ledger).refusal(
            sqlite3.OperationalError("attempt to write a readonly database")
        ),
        OutboxError(f"the outbox {paths.outbox} cannot be used: 7 bytes are free; is untouched"),
        full,
    ]


def test_storage_failure_stops_a_sweep(paths: SweepPaths) -> None:
    paths.spec.touch()
    for error in _failures(paths):
        code, lines = _end(error, paths)
        assert code == NO_SUCCESS
        assert len(lines) == 3
        assert lines[0].startswith("stopped: ")
        for part in (str(paths.directory), "bytes are free", "untouched"):
            assert part in lines[0]
        assert lines[-1].endswith(f"resume digits --root {paths.root}")


def test_storage_failure_at_creation_refuses_the_sweep(paths: SweepPaths) -> None:
    for error in _failures(paths):
        assert _end(error, paths) == (WRONG_INPUT, [str(error)])


def test_damaged_ledger_is_left_to_the_user(paths: SweepPaths) -> None:
    paths.spec.touch()
    damaged = LedgerFile(paths.ledger).refusal(sqlite3.DatabaseError("file is not a database"))
    code, lines = _end(damaged, paths)
    assert (code, lines[0]) == (WRONG_INPUT, str(damaged))


def test_locked_ledger_is_reported(paths: SweepPaths) -> None:
    paths.spec.touch()
    lost = lock_lost("the lock was replaced", paths.directory)
    for error in (LedgerBusy(paths.ledger, 30.0), lost):
        code, lines = _end(error, paths)
        assert (code, lines[0]) == (HELD, str(error))


def test_ray_that_fails_to_start_ends_with_a_message(
    paths: SweepPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    # Other tests of this process may share a Ray, which is none of this one's business.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    paths.spec.touch()
    token = uuid.uuid4().hex
    with pytest.raises(local_ray.NoRay) as late:
        local_ray.start(token, Machine("test", cpus=1, memory=2**30, gpus=()), concurrency=1)
    local_ray.stop(token)
    code, lines = _end(late.value, paths)
    assert code == NO_SUCCESS
    assert lines[0].startswith("stopped: Ray could not be started: The current node timed out")
    assert lines[-1].endswith(f"resume digits --root {paths.root}")


def test_resume_never_chooses_again(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path)
    before = made.paths.spec.read_bytes()
    done = CliRunner().invoke(
        app, ["resume", "small", "--root", str(tmp_path), "-s", "trials=40", "-s", "search=auto"]
    )
    assert done.exit_code == WRONG_INPUT
    assert "auto" in done.output
    assert made.paths.spec.read_bytes() == before
