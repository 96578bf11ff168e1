"""The files of an outbox: SQLite's with its tables and its lock, and copies of waiting artifacts.

Each copy is synced before it is queued. It has a directory of its own and keeps its file name,
because the server names the artifact after it. What must not live here: what the records mean, and
when a copy is made or delivered (`outbox`, `delivery`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sqlite3
import stat
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from tracking.lock_holders import describe_database_lock
from tracking.metric_points import HighWaterMarks

FILE_NAME = "outbox.db"
_WAIT_SECONDS = 60.0
"""Seconds to wait for another process's transaction."""

_VERSION = 5
_SCHEMA = """
CREATE TABLE records (
    id INTEGER PRIMARY KEY, trial INTEGER NOT NULL, kind TEXT NOT NULL, payload TEXT NOT NULL);
CREATE INDEX records_in_order ON records (trial, id);
CREATE TABLE refused (
    id INTEGER PRIMARY KEY, trial INTEGER NOT NULL, kind TEXT NOT NULL, payload NOT NULL,
    reason TEXT NOT NULL);
CREATE TABLE runs (trial INTEGER PRIMARY KEY, run_id TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE told (trial INTEGER PRIMARY KEY, status TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE marks (
    trial INTEGER PRIMARY KEY, delivered TEXT NOT NULL, in_flight TEXT) WITHOUT ROWID;
CREATE TABLE logs (
    trial INTEGER PRIMARY KEY, step INTEGER NOT NULL, every INTEGER NOT NULL,
    ended INTEGER NOT NULL, waits INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX told_in_order ON records (trial, id) WHERE kind != 'artifact';
CREATE INDEX artifacts_in_order ON records (trial, id) WHERE kind = 'artifact';
CREATE TABLE notifications (
    id TEXT PRIMARY KEY, delivered INTEGER NOT NULL, body TEXT NOT NULL);
"""
"""Without the last two indexes, each artifact scans all records."""


class OutboxError(OSError):
    """The outbox's file cannot be used."""


def check_file(path: Path) -> None:
    """Check that SQLite's files are regular, before SQLite, which blocks on a FIFO, opens them."""
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
    """
    if db.execute("SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchone():
        raise sqlite3.DatabaseError("it holds a view or a trigger, and an outbox has neither")


def open_file(path: Path) -> sqlite3.Connection:
    """Open the outbox's file, and create its tables if it is empty."""
    check_file(path)
    db = sqlite3.connect(
        path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
    )
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


def set_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    """Store a value in the table `meta`."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def delete_meta(db: sqlite3.Connection, *keys: str) -> None:
    """Remove values from the table `meta`."""
    db.executemany("DELETE FROM meta WHERE key = ?", [(key,) for key in keys])


class Marks(NamedTuple):
    """How far a trial's metrics are delivered."""

    delivered: HighWaterMarks
    """What the server has acknowledged."""
    in_flight: HighWaterMarks | None = None
    """How far points may have been sent; None: no further."""

    @property
    def is_uncertain(self) -> bool:
        """Whether the server may have points above those that it has acknowledged."""
        return self.in_flight is not None or not self.delivered.are_complete


def save_marks(db: sqlite3.Connection, trial: int, marks: Marks) -> None:
    """Store a trial's marks."""
    texts = [None if one is None else json.dumps(vars(one)) for one in marks]
    db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", (trial, *texts))


def read_marks(db: sqlite3.Connection, trial: int) -> Marks:
    """Return a trial's marks."""
    query = "SELECT delivered, in_flight FROM marks WHERE trial = ?"
    row = db.execute(query, (trial,)).fetchone()
    if row is None:
        return Marks(HighWaterMarks())
    return Marks(*(HighWaterMarks(**json.loads(text)) for text in row if text is not None))


def outbox_error(path: Path, error: sqlite3.Error, content: str = "records") -> OutboxError:
    """Return the error of a program that cannot use the outbox."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # the rest says details
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        holder, remedy = describe_database_lock(path)
        return OutboxError(
            f"{holder} has locked the outbox {path} for {_WAIT_SECONDS:g} s; transactions take "
            f"milliseconds; its {content} are unchanged; {remedy}, then resume"
        )
    free = shutil.disk_usage(path.parent).free
    return OutboxError(
        f"the outbox {path} cannot be used: {error}; {free} bytes are free on that disk; its "
        f"{content} are unchanged; free space or correct the permissions, then resume"
    )


class OutboxFile:
    """The file of one outbox, opened to be written, and the lock of its delivery."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / FILE_NAME
        self._lock = threading.Lock()
        self._closed = False
        self.moved_aside: Path | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            # Mode 0600: a user who can open the file can lock it, and block the delivery.
            self._owner = os.open(directory / "drain.lock", flags, 0o600)
            if os.fstat(self._owner).st_uid == os.geteuid():
                os.fchmod(self._owner, 0o600)
        except OSError as error:
            raise OutboxError(f"cannot write the outbox {directory}: {error}") from error
        try:
            try:
                self._db = open_file(self._path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                # Nothing in a damaged file can be trusted. The server's history says what was
                # delivered, and the trials' metrics.jsonl hold the rest.
                self.moved_aside = move_aside(self._path)
                self._db = open_file(self._path)
        except sqlite3.Error as error:
            os.close(self._owner)
            raise outbox_error(self._path, error) from error

    def try_lock(self) -> bool:
        """Take the lock of the one process that delivers; False while another one holds it."""
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._closed:
            raise OutboxError(
                f"the outbox {self._path} is closed; nothing can be recorded any more"
            )
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:  # Ctrl-C must roll back, too; the error is raised again
                if self._db.in_transaction:  # SQLite itself rolls back when the disk is full
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise outbox_error(self._path, error) from error

    def _sync(self) -> None:
        """Wait until every commit so far is on the disk, without blocking appends.

        Commits go to the write-ahead log without an fsync, and a checkpoint syncs the log before
        it moves pages. So one fsync of the log covers every commit so far. SQLite's locks are on
        other files, so closing the log here drops none of them.
        """
        sync_path(Path(f"{self._path}-wal"))

    def _close_file(self) -> None:
        self._closed = True
        self._db.close()
        os.close(self._owner)


_DIRECTORY = "artifacts"


def check_artifact_name(name: str) -> PurePosixPath:
    """Return `name` as a path; ValueError: it is empty, absolute or leaves a run's directory."""
    path = PurePosixPath(name)
    if not path.name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(
            f"artifact name is {name!r}; it must be a relative path that stays below the run; "
            "write something like 'figures/loss.png'"
        )
    return path


class Staging:
    """The copies in an outbox."""

    def __init__(self, outbox: Path) -> None:
        self._outbox = outbox
        self._directory = outbox / _DIRECTORY

    def copy(self, path: Path, name: str) -> dict[str, str]:
        """Copy a file and sync the copy to the disk."""
        target = check_artifact_name(name)
        copy = self._directory / uuid.uuid4().hex / target.name
        copy.parent.mkdir(parents=True)
        try:
            with os.fdopen(open_regular(path), "rb") as source, copy.open("xb") as file:
                shutil.copyfileobj(source, file)
            for each in (copy, copy.parent, self._directory, self._outbox):
                sync_path(each)
        except BaseException:  # Ctrl-C must remove the copy, too; the error is raised again
            shutil.rmtree(copy.parent, ignore_errors=True)
            raise
        folder = "" if str(target.parent) == "." else str(target.parent)
        return {"staged": str(copy.relative_to(self._outbox)), "folder": folder}

    def find(self, staged: str) -> Path:
        """Return a copy's path."""
        parts = PurePath(staged).parts
        if len(parts) != 3 or parts[0] != _DIRECTORY or ".." in parts:
            raise ValueError(
                f"{staged!a} is not a staged copy: copies are in {self._directory}, each in "
                "a directory of its own; nothing else is sent or removed"
            )
        copy = self._outbox / staged
        for link in (self._directory, copy.parent):
            if link.is_symlink():
                raise ValueError(
                    f"{link} is a symbolic link, and copies are in directories: nothing else is "
                    "sent or removed; find out who created the link, and remove it"
                )
        try:
            is_file = stat.S_ISREG(copy.lstat().st_mode)
        except OSError as error:
            raise ValueError(
                f"the staged artifact {copy} is missing ({error.strerror})"
            ) from error
        if not is_file:
            raise ValueError(
                f"the staged artifact {copy} is not a regular file, and nothing else is sent"
            )
        return copy

    def remove(self, payload: Mapping[str, str]) -> None:
        """Remove a copy; a missing one is no error."""
        with contextlib.suppress(ValueError):
            shutil.rmtree(self.find(payload["staged"]).parent, ignore_errors=True)

    def keep_only(self, payloads: Iterable[Mapping[str, str]]) -> None:
        """Remove copies without a record: a process died before its commit or during a removal.

        Nothing is removed through a symbolic link, which may lead anywhere.
        """
        if self._outbox.is_symlink() or self._directory.is_symlink():
            return
        if not self._directory.is_dir():
            return
        kept = {PurePath(payload["staged"]).parent.name for payload in payloads}
        for directory in self._directory.iterdir():
            if directory.name not in kept:
                shutil.rmtree(directory, ignore_errors=True)


def open_regular(path: Path) -> int:
    """Open a regular file for reading; never follow a link, never block on a FIFO."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            f"{path} is a symbolic link, and only regular files are tracked; replace it by a copy "
            "of the file"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a regular file, and only such files are tracked; remove it")
    return file


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
