"""A ledger in a file of its own, the embedded default: opening it without changing it, and saying
clearly what is wrong with it.

What must not live here: what it holds (`ledger`, `ledger.view`), and Optuna.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from sweeps.ledger.dialect import Dialect
from sweeps.paths import LedgerBusy, LedgerError, LedgerRefused
from trainable.regular_files import check_database

WAIT_SECONDS = 30.0
"""How long another process' transaction is waited for."""
_COMPUTES = "SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger')"


class LedgerFile:
    """One SQLite database; see `ledger_place.Place`.

    Args:
        path: The file.
    """

    study = "sweep"
    sql = Dialect(infinity="9e999", minus_infinity="-9e999", starts="key GLOB '{text}*'")
    errors: tuple[type[Exception], ...] = (sqlite3.Error,)
    notes: Mapping[str, str] = MappingProxyType({})

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a sound ledger for one read transaction: what it sees belongs together.

        Raises:
            LedgerError: There is no such file, or it is not sound.
        """
        try:
            exists = check_database(self.path)
        except OSError as error:
            raise LedgerError(str(error)) from error
        if not exists:
            num_left = len(list(self.path.parent.glob("trials/[0-9]*")))
            raise LedgerError(
                f"there is no ledger at {self.path}; it is the record of all trials, and none is "
                f"made beside the {num_left} trial directories that are left there; restore it "
                "from a backup, or begin anew with: sweep run FILE --name NAME"
            )
        try:
            # "rw" never creates a file, and rolls back what a driver that died had not committed,
            # which a connection that may only read could not. Statements cannot write
            # nevertheless.
            address = f"{self.path.absolute().as_uri()}?mode=rw"
            with contextlib.closing(
                sqlite3.connect(address, uri=True, timeout=WAIT_SECONDS)
            ) as db:
                db.execute("PRAGMA query_only = ON")
                if db.execute(_COMPUTES).fetchone():  # a planted view may never come to an end
                    raise self.damaged("it holds a view or a trigger, and a ledger has neither")
                if (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                    raise self.damaged(verdict)
                db.execute("BEGIN")
                yield db
        except LedgerError:
            raise
        except sqlite3.Error as error:
            raise self.refusal(error) from error
        except Exception as error:  # a flipped bit may surface in any decoder of what was read
            raise self.damaged(f"{type(error).__name__}: {error}") from error

    def num_trials(self) -> int | None:
        """Count its trials without changing anything; None when it holds no study.

        Raises:
            LedgerError: There is no such file, or it is not a sound database.
        """
        with self.reading() as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'studies'").fetchone():
                return None
            if not db.execute("SELECT 1 FROM studies").fetchone():
                return None
            return int(db.execute("SELECT COUNT(*) FROM trials").fetchone()[0])

    def check_available(self) -> None:
        """Nothing: it lies in the sweep's directory, and is looked at with that."""

    def remove_incomplete(self, spec: Path) -> None:
        """Remove what a driver left that died before the sweep existed; never a ledger of trials.

        Raises:
            LedgerError: There are trials.
        """
        if self.path.exists() and self.num_trials():
            raise LedgerError(
                f"{spec} is gone, but {self.path} holds trials; a sweep of that name is not "
                "begun anew; restore the spec from a backup, or choose another name with --name"
            )
        self.path.unlink(missing_ok=True)

    def lock(self) -> None:
        """None: whoever holds the directory holds the file in it."""

    def holder(self) -> None:
        """None: see `lock`."""

    def refusal(self, error: Exception) -> LedgerError:
        """Return what an error of the storage below means: busy, not usable, or damaged."""
        cause = _sqlite_error(error)
        reason = str(cause or error).splitlines()[0]
        if "locked" in reason or "busy" in reason:
            return LedgerBusy(self.path, WAIT_SECONDS)
        if isinstance(cause, sqlite3.OperationalError) and "no such" not in reason:
            free = shutil.disk_usage(self.path.parent).free
            return LedgerRefused(
                f"the ledger {self.path} cannot be used: {reason}; {free} bytes are free on that "
                "disk; what it holds is untouched; free space or correct the permissions, then "
                "resume"
            )
        return self.damaged(reason)

    def damaged(self, reason: str) -> LedgerError:
        """Return the error about a ledger that cannot be read."""
        return LedgerError(
            f"{self.path} is not a readable ledger: {reason}; it is one SQLite database, the "
            "record of all trials; it is left as it is; restore it from a backup"
        )


def _sqlite_error(error: BaseException | None) -> sqlite3.Error | None:
    """Return the error of SQLite itself below those of the layers above it."""
    while error is not None and not isinstance(error, sqlite3.Error):
        error = getattr(error, "orig", None) or error.__cause__
    return error
