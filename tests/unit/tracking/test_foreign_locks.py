"""Locks of another user block nobody, and few files are readable.

What must not live here: the sweep's own lock (`tests/unit/sweeps/test_sweep_lock.py`).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tracking import mlflow_server
from tracking.outbox import Outbox, OutboxError


def test_locked_root_is_named_after_a_bounded_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_server, "_CREATE_SECONDS", 0.2)
    theirs = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(theirs, fcntl.LOCK_EX)
    try:
        with pytest.raises(TimeoutError, match=f"{tmp_path} has been locked for 0.2 s"):
            mlflow_server._create(tmp_path / "mlflow.db")
    finally:
        os.close(theirs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("earlier", [None, 0o644, 0o666])
def test_only_its_owner_can_lock_the_outbox(tmp_path: Path, earlier: int | None) -> None:
    lock = tmp_path / "drain.lock"
    if earlier is not None:
        lock.touch()
        lock.chmod(earlier)
    Outbox(tmp_path).close()
    assert lock.stat().st_mode & 0o777 == 0o600


def test_delivery_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "drain.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutboxError, match="cannot write the outbox"):
        Outbox(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
