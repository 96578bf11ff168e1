"""Who has locked a database is named."""

from __future__ import annotations

import os
import pwd
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sweeps.errors import LedgerBusy
from sweeps.ledger.sqlite import LedgerFile
from tests.lock_reader import NOBODY, reader
from tracking import outbox_file
from tracking.outbox import Outbox, OutboxError

USERS = [
    os.geteuid(),
    pytest.param(
        NOBODY,
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else"),
    ),
]


@pytest.fixture(autouse=True)
def _files_of_all(tmp_path: Path) -> Iterator[None]:
    """Let other users read the files of the test, as those of a shared sweep."""
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    yield
    os.umask(before)


def described(user: int, pid: int, path: Path) -> tuple[str, str]:
    """The words for the holder and for the remedy."""
    if user == os.geteuid():
        return f"process {pid}", "end it"
    name = pwd.getpwuid(user).pw_name
    remedy = f"have that user end it, and keep other users out: chmod go= {path.parent}"
    return f"process {pid} of user {name}", remedy


@pytest.mark.parametrize("user", USERS)
def test_reader_that_locks_the_ledger_is_named(tmp_path: Path, user: int) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE studies (a)")
    db.close()
    with reader(path, user) as pid:
        db = sqlite3.connect(path, timeout=0.1)
        with pytest.raises(sqlite3.OperationalError) as locked:
            db.execute("DROP TABLE studies")
        db.close()
        error = LedgerFile(path).refusal(locked.value)
    holder, remedy = described(user, pid, path)
    assert isinstance(error, LedgerBusy)
    assert str(error) == (
        f"{holder} has locked the ledger {path} for 30 s; transactions take milliseconds; "
        f"{remedy}, then resume"
    )


@pytest.mark.parametrize("user", USERS)
def test_reader_that_locks_the_outbox_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setattr(outbox_file, "_WAIT_SECONDS", 0.2)
    with (
        closing(Outbox(tmp_path)) as outbox,
        reader(tmp_path / "outbox.db-shm", user) as pid,
        pytest.raises(OutboxError) as refused,
    ):
        outbox.set_run_id(0, "a", None)
    holder, remedy = described(user, pid, tmp_path / "outbox.db")
    assert str(refused.value) == (
        f"{holder} has locked the outbox {tmp_path / 'outbox.db'} for 0.2 s; transactions take "
        f"milliseconds; its records are unchanged; {remedy}, then resume"
    )
