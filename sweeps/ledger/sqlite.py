"""Open a ledger's SQLite file without changing it, and explain its errors.

What must not live here: what a ledger holds (`ledger`, `ledger.reader`), and Optuna.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sweeps.errors import LedgerBusy, LedgerError, LedgerRefused
from sweeps.optuna_compat import tables
from tracking.processes import describe_database_lock
from trainable.store.regular_files import check_database

STUDY = "sweep"
"""The name of the Optuna study in each ledger."""
WAIT_SECONDS = 30.0
"""Seconds to wait for another process's transaction."""
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE name = ?"
_COMPUTES = "SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger')"


class LedgerFile:
    """A ledger's SQLite database. `str` returns the name that messages use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

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
        try:
            # Mode "rw" never creates a file. Unlike a read-only connection, it can roll back what
            # a dead driver did not commit. `query_only` still forbids statements that write.
            address = f"{self.path.absolute().as_uri()}?mode=rw"
            with contextlib.closing(
                sqlite3.connect(address, uri=True, timeout=WAIT_SECONDS)
            ) as db:
                db.execute("PRAGMA query_only = ON")
                if db.execute(_COMPUTES).fetchone():  # an attacker's view may never end
                    raise self.damaged("it holds a view or a trigger, and a ledger has neither")
                if (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                    raise self.damaged(verdict)
                db.execute("BEGIN")
                yield db
        except LedgerError:
            raise
        except sqlite3.Error as error:
            raise self.refusal(error) from error
        except Exception as error:  # a damaged file can raise any error in a decoder
            raise self.damaged(f"{type(error).__name__}: {error}") from error

    def num_trials(self) -> int | None:
        """Count the trials without changing anything; None when the file holds no study."""
        with self.reading() as db:
            if not db.execute(_HAS_TABLE, [tables.STUDIES_TABLE]).fetchone():
                return None
            if not db.execute(tables.ANY_STUDY_QUERY).fetchone():
                return None
            return int(db.execute(tables.COUNT_TRIALS_QUERY).fetchone()[0])

    def remove_incomplete(self, spec: Path) -> None:
        """Remove the empty ledger of a driver that died while it created the sweep."""
        if self.path.exists() and self.num_trials():
            raise LedgerError(
                f"{spec} is gone, but {self.path} holds trials; a sweep of that name is not "
                "begun anew; restore the spec from a backup, or choose another name with --name"
            )
        self.path.unlink(missing_ok=True)

    def refusal(self, error: Exception) -> LedgerError:
        """Translate an error of the storage: the ledger is busy, unusable or damaged."""
        cause = _sqlite_error(error)
        reason = str(cause or error).splitlines()[0]
        if "locked" in reason or "busy" in reason:
            return LedgerBusy(self.path, WAIT_SECONDS, *describe_database_lock(self.path))
        if isinstance(cause, sqlite3.OperationalError) and "no such" not in reason:
            free = shutil.disk_usage(self.path.parent).free
            return LedgerRefused(
                f"the ledger {self.path} cannot be used: {reason}; {free} bytes are free on that "
                "disk; what it holds is untouched; free space or correct the permissions, then "
                "resume"
            )
        if cause is None:  # the database works, and rejects what is written
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


def _sqlite_error(error: BaseException | None) -> sqlite3.Error | None:
    """Return SQLite's own error from the chain of causes."""
    while error is not None and not isinstance(error, sqlite3.Error):
        error = getattr(error, "orig", None) or error.__cause__
    return error
