"""Open a ledger's SQLite file without changing it, and explain its errors.

What must not live here: what a ledger holds (`ledger`, `ledger.reader`), and Optuna.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from sweeps.errors import LedgerBusy, LedgerError, LedgerRefused
from sweeps.optuna_compat import tables
from tracking.lock_holders import describe_database_lock
from trainable.store.regular_files import check_database

STUDY = "sweep"
"""The name of the Optuna study in each ledger."""
IN_MEMORY = Path(":memory:")
"""The path of a ledger that is never stored."""
WAIT_SECONDS = 30.0
"""Seconds to wait for another process's transaction."""
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE name = ?"
_REPORTS_QUERY = tables.REPORTS_QUERY.format(number=tables.number_sql(*tables.INTERMEDIATE_VALUE))
_COMPUTES = "SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger')"


class LedgerFile:
    """A ledger's SQLite database. `str` returns the name that messages use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def connect(self) -> sqlite3.Connection:
        """Open the ledger for a driver, which alone writes; a missing file is created."""
        with self.errors():
            # Other commands read while the driver writes; SQLite then waits for the driver's
            # transaction instead of failing.
            db = sqlite3.connect(
                self.path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False
            )
            # Sync the directory, too, after SQLite removes a transaction's journal. Otherwise a
            # power loss may restore the journal, and SQLite rolls the transaction back.
            db.execute("PRAGMA synchronous = EXTRA")
            return db

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise errors of the database as `LedgerError`."""
        try:
            yield
        except sqlite3.Error as error:
            raise self.refusal(error) from error

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Raise errors of the database, and of what is read from it, as `LedgerError`."""
        try:
            with self.errors():
                yield
        except LedgerError:
            raise
        except Exception as error:  # a damaged file can raise any error in a decoder
            raise self.damaged(f"{type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open the ledger for one read transaction, which sees one consistent snapshot."""
        try:
            exists = check_database(self.path)
        except OSError as error:
            raise LedgerError(str(error)) from error
        if not exists:
            num_trials = len(list(self.path.parent.glob("trials/[0-9]*")))
            raise LedgerError(
                f"there is no ledger at {self.path}; it is the record of all trials, and none is "
                f"made beside the {num_trials} trial directories that are left there; restore it "
                "from a backup, or begin anew with: sweep run FILE --name NAME"
            )
        # Mode "rw" never creates a file. Unlike a read-only connection, it can roll back what a
        # dead driver did not commit. `query_only` still forbids statements that write.
        address = f"{self.path.absolute().as_uri()}?mode=rw"
        with (
            self.decoding(),
            contextlib.closing(sqlite3.connect(address, uri=True, timeout=WAIT_SECONDS)) as db,
        ):
            db.execute("PRAGMA query_only = ON")
            if db.execute(_COMPUTES).fetchone():  # an attacker's view may never end
                raise self.damaged("it holds a view or a trigger, and a ledger has neither")
            if (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise self.damaged(verdict)
            db.execute("BEGIN")
            yield db

    def num_trials(self) -> int | None:
        """Count the trials without changing anything; None when the file holds no study."""
        with self.reading() as db:
            if not db.execute(_HAS_TABLE, [tables.STUDIES_TABLE]).fetchone():
                return None
            if not db.execute(tables.ANY_STUDY_QUERY).fetchone():
                return None
            self.check_tables(db)
            return int(db.execute(tables.COUNT_TRIALS_QUERY).fetchone()[0])

    def check_tables(self, db: sqlite3.Connection) -> None:
        """Check that the tables have the version that this release reads."""
        ((number, library),) = db.execute(tables.VERSION_QUERY)
        ((revision,),) = db.execute(tables.REVISION_QUERY)
        if (number, revision) != tables.SCHEMA:
            raise LedgerError(
                f"{self} has tables of version {number} ({revision}), by Optuna {library}; "
                f"this release reads version {tables.SCHEMA[0]} ({tables.SCHEMA[1]}); "
                "look at it with the release that wrote it"
            )

    def remove_incomplete(self, spec: Path) -> None:
        """Remove the empty ledger of a driver that died while it created the sweep."""
        if self.path.exists() and self.num_trials():
            raise LedgerError(
                f"{spec} is gone, but {self.path} holds trials; a sweep of that name is not "
                "begun anew; restore the spec from a backup, or choose another name with --name"
            )
        self.path.unlink(missing_ok=True)

    def refusal(self, error: sqlite3.Error) -> LedgerError:
        """Translate an error of the storage: the ledger is busy, unusable or damaged."""
        reason = str(error).splitlines()[0]
        if "locked" in reason or "busy" in reason:
            return LedgerBusy(self.path, WAIT_SECONDS, *describe_database_lock(self.path))
        if isinstance(error, sqlite3.OperationalError) and "no such" not in reason:
            free = shutil.disk_usage(self.path.parent).free
            return LedgerRefused(
                f"the ledger {self.path} cannot be used: {reason}; {free} bytes are free on that "
                "disk; what it holds is untouched; free space or correct the permissions, then "
                "resume"
            )
        if isinstance(error, sqlite3.IntegrityError):  # it works, and rejects what is written
            return LedgerRefused(
                f"the ledger {self.path} cannot be used: {reason}; what it holds is untouched; "
                "remove what another program added to it, such as a trigger, then resume"
            )
        return self.damaged(reason)

    def damaged(self, reason: str) -> LedgerError:
        """Return the error about a ledger that cannot be read."""
        return LedgerError(
            f"{self.path} is not a readable ledger: {reason}; it is one SQLite database, the "
            "record of all trials; it is left as it is; restore it from a backup"
        )


def trial_rows(db: sqlite3.Connection, study: Mapping[str, int]) -> Iterator[tuple[Any, ...]]:
    """Yield Optuna's key, number, state, start and end of each trial, in the order of numbers."""
    rows = db.execute(tables.TRIALS_QUERY, study)
    text = (str, NoneType)
    for index, row in enumerate(_typed(rows, int, int, str, text, text)):
        if row[1] != index:
            raise ValueError(f"its trial {index} has the number {row[1]}")
        yield row


def param_rows(db: sqlite3.Connection, study: Mapping[str, int]) -> Iterator[tuple[Any, ...]]:
    """Yield Optuna's key, name, stored value and distribution of each trial's parameters."""
    return _typed(db.execute(tables.PARAMS_QUERY, study), int, str, (int, float), str)


def report_rows(
    db: sqlite3.Connection, study: Mapping[str, int]
) -> Iterator[tuple[int, int, float]]:
    """Yield number, epoch and intermediate value of each trial's reports."""
    rows = db.execute(_REPORTS_QUERY, study)
    for trial, epoch, value in _typed(rows, int, int, (int, float, NoneType)):
        yield trial, epoch, math.nan if value is None else float(value)


def _typed(
    rows: Iterable[tuple[Any, ...]], *types: type | tuple[type, ...]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows and check the type of each value: SQLite stores any type in any column."""
    for row in rows:
        for value, expected in zip(row, types, strict=True):
            if not isinstance(value, expected):
                raise ValueError(f"it holds a {type(value).__name__} where none belongs")
        yield row


def database_damage(file: Path) -> str | None:
    """Return what SQLite finds wrong in a database; None without a file, or if nothing is wrong.

    A database that cannot be opened now is not known to be damaged.
    """
    if not file.is_file():
        return None
    try:
        address = f"{file.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as db:
            verdict = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
    except sqlite3.OperationalError:
        return None
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if verdict == "ok" else " ".join(verdict.split())
