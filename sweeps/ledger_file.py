"""The ledger's file: opening it without changing it, and saying clearly what is wrong with it.

What must not live here: what it holds (`ledger`, `ledger_view`), and Optuna.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sweeps.layout import LedgerBusy, LedgerError, LedgerRefused

WAIT_SECONDS = 30.0
"""How long another process' transaction is waited for."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a sound ledger for one read transaction: what it sees belongs together.

    Raises:
        LedgerError: There is no such file, or it is not sound.
    """
    if not path.exists():
        raise LedgerError(f"there is no ledger at {path}")
    try:
        # "rw" never creates a file, and rolls back what a driver that died had not committed,
        # which a connection that may only read could not. Statements cannot write nevertheless.
        address = f"{path.absolute().as_uri()}?mode=rw"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=WAIT_SECONDS)) as db:
            db.execute("PRAGMA query_only = ON")
            if (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise damaged(path, verdict)
            db.execute("BEGIN")
            yield db
    except LedgerError:
        raise
    except sqlite3.Error as error:
        raise refusal(path, error) from error
    except Exception as error:  # a flipped bit may surface in any decoder of what was read
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def num_trials(path: Path) -> int | None:
    """Count a ledger's trials without changing anything; None when it holds no study.

    Raises:
        LedgerError: There is no such file, or it is not a sound database.
    """
    with reading(path) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'studies'").fetchone():
            return None
        if not db.execute("SELECT 1 FROM studies").fetchone():
            return None
        return int(db.execute("SELECT COUNT(*) FROM trials").fetchone()[0])


def refusal(path: Path, error: Exception) -> LedgerError:
    """Return what an error of the storage below means: busy, not usable, or damaged."""
    cause = _sqlite_error(error)
    reason = str(cause or error).splitlines()[0]
    if "locked" in reason or "busy" in reason:
        return LedgerBusy(path, WAIT_SECONDS)
    if isinstance(cause, sqlite3.OperationalError) and "no such" not in reason:
        free = shutil.disk_usage(path.parent).free
        return LedgerRefused(
            f"the ledger {path} cannot be used: {reason}; {free} bytes are free on that disk; "
            "what it holds is untouched; free space or correct the permissions, then resume"
        )
    return damaged(path, reason)


def damaged(path: Path, reason: str) -> LedgerError:
    """Return the error about a ledger that cannot be read."""
    return LedgerError(
        f"{path} is not a readable ledger: {reason}; it is one SQLite database, the record of all "
        "trials; it is left as it is; restore it from a backup"
    )


def _sqlite_error(error: BaseException | None) -> sqlite3.Error | None:
    """Return the error of SQLite itself below those of the layers above it."""
    while error is not None and not isinstance(error, sqlite3.Error):
        error = getattr(error, "orig", None) or error.__cause__
    return error
