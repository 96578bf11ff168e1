"""Kill a driver at known places repeatedly: nothing is lost and nothing doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def run(program: Path, directory: Path, place: str, passage: int) -> int:
    command = [sys.executable, str(program), str(directory), place, str(passage)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, timeout=60, check=False).returncode


@pytest.mark.parametrize(
    ("place", "passages"),
    [
        ("after append_rows", (1, 20)),
        ("after create_run", (1, 3)),
        ("after set_run_id", (2,)),
        ("after prepare", (2, 6)),
        ("after next_batch", (2, 5)),
        ("before log_points", (1,)),
        ("after log_points", (1, 2, 3)),
        ("before delivered", (4, 6)),
        ("after log_params", (2,)),
        ("after set_status", (1,)),
    ],
)
def test_every_point_arrives_exactly_once_after_kills(
    disk_server: ModuleType, tmp_path: Path, place: str, passages: tuple[int, ...]
) -> None:
    program = Path(disk_server.__file__ or "")
    for passage in passages:
        assert run(program, tmp_path, place, passage) == -signal.SIGKILL
    assert run(program, tmp_path, "nowhere", 1) == 0

    server = disk_server.DiskServer(tmp_path / "server.db")
    for trial in range(disk_server.TRIALS):
        assert server.points(trial) == disk_server.expected(trial)
        [(status, params, tags)] = server.runs(trial)
        assert (status, params) == ("FINISHED", {"lr": str(trial)})
        assert tags["mlflow.parentRunId"]
    [(status, params, _)] = server.runs(-1)
    assert (status, params) == ("FINISHED", {"trials": "3"})
    server.close()


def test_deleted_outbox_is_rebuilt_from_the_server(
    disk_server: ModuleType, tmp_path: Path
) -> None:
    program = Path(disk_server.__file__ or "")
    assert run(program, tmp_path, "after log_points", 3) == -signal.SIGKILL
    for file in (tmp_path / "outbox").iterdir():
        file.unlink()
    assert run(program, tmp_path, "nowhere", 1) == 0
    server = disk_server.DiskServer(tmp_path / "server.db")
    for trial in range(disk_server.TRIALS):
        assert server.points(trial) == disk_server.expected(trial)
        assert len(server.runs(trial)) == 1
    server.close()
