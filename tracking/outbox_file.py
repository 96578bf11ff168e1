"""The outbox's SQLite file: its name and tables, opening it, and moving a damaged one aside.

What must not live here: what the records mean.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import uuid
from pathlib import Path

FILE_NAME = "outbox.db"

_VERSION = 3
_SCHEMA = """
CREATE TABLE records (
    id INTEGER PRIMARY KEY, trial INTEGER NOT NULL, kind TEXT NOT NULL, state INTEGER NOT NULL,
    points INTEGER NOT NULL, payload NOT NULL);
CREATE INDEX records_in_order ON records (trial, id);
CREATE TABLE refused (
    id INTEGER PRIMARY KEY, trial INTEGER NOT NULL, kind TEXT NOT NULL, payload NOT NULL,
    reason TEXT NOT NULL);
CREATE TABLE runs (trial INTEGER PRIMARY KEY, run_id TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE told (trial INTEGER PRIMARY KEY, status TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE marks (trial INTEGER PRIMARY KEY, marks TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""

_ADDITIONS = """
CREATE INDEX IF NOT EXISTS told_in_order ON records (trial, id) WHERE kind != 'artifact';
CREATE INDEX IF NOT EXISTS artifacts_in_order ON records (trial, id) WHERE kind = 'artifact';
CREATE TABLE IF NOT EXISTS notifications (
    id TEXT PRIMARY KEY, delivered INTEGER NOT NULL, body TEXT NOT NULL);
"""
"""Also added to files of earlier releases, which ignore them. Without an index, each artifact
scans all records."""


class OutboxError(OSError):
    """The outbox's file cannot be used."""


def check_file(path: Path) -> None:
    """Check that the database and SQLite's side files are regular files, before SQLite opens them.

    SQLite would block forever on a FIFO.

    Raises:
        sqlite3.DatabaseError: One of them is something else.
    """
    for suffix in ("", "-wal", "-journal", "-shm"):
        try:
            found = os.lstat(f"{path}{suffix}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISREG(found.st_mode):
            raise sqlite3.DatabaseError(f"{path.name}{suffix} is not a regular file")


def check_tables(db: sqlite3.Connection) -> None:
    """Check that the database has no views or triggers.

    A planted view may be an endless query, and a planted trigger writes records of its own.

    Raises:
        sqlite3.DatabaseError: It has one, or is not a database.
    """
    if db.execute("SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchone():
        raise sqlite3.DatabaseError("it holds a view or a trigger, and an outbox has neither")


def open_file(path: Path) -> sqlite3.Connection:
    """Open the outbox's file, and create its tables if it is empty.

    Raises:
        OutboxError: Another release wrote it.
        sqlite3.DatabaseError: It is not a database, or cannot be opened.
    """
    check_file(path)
    db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    try:
        check_tables(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            # One transaction: a process killed here leaves an empty file, not part of a schema.
            db.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;"
            )
        elif version != _VERSION:
            raise OutboxError(
                f"the outbox {path} has version {version}; this release reads {_VERSION}; "
                "use the release that wrote it to deliver it"
            )
        elif (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(verdict)
        db.executescript(_ADDITIONS)
    except BaseException:  # Ctrl-C must close the connection, too; the error is raised again
        db.close()
        raise
    return db


def move_aside(path: Path) -> Path:
    """Rename a damaged file, so that a user can inspect it; returns its new path."""
    aside = path.with_name(f"{path.name}.damaged-{uuid.uuid4().hex[:8]}")
    if os.path.lexists(path):
        path.rename(aside)
    for suffix in ("-wal", "-journal", "-shm"):
        beside = Path(f"{path}{suffix}")
        if beside.is_dir() and not beside.is_symlink():
            beside.rename(f"{aside}{suffix}")
        else:
            beside.unlink(missing_ok=True)
    return aside


def read_meta(db: sqlite3.Connection, key: str) -> str | None:
    """Return a value of the table `meta`; None if it has none."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row[0]) if row else None
