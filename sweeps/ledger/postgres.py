"""Connect to ledgers in a PostgreSQL database, read them without changes, and explain errors.

Each sweep is one Optuna study. The additional table `gradsweep_drivers` has a row for each sweep.
Its column `turn` is the fencing token of the driver that may write. Its column `written` counts
the transactions that this driver has committed (see `database_lock` and `ledger.storage`). What
must not live here: what a ledger holds (`ledger`, `ledger.reader`), Optuna, and SQLAlchemy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sweeps.errors import LedgerBusy, LedgerError, LedgerRefused, LockLost
from sweeps.ledger.dialect import Dialect, check_tables, one
from sweeps.optuna_compat import tables
from sweeps.store_access import check_store
from sweeps.sweep_lock import LockOwner, lock_lost, sweep_locked
from tracking.trusted_stores import StoreUntrusted, secured

WAIT_SECONDS = 30.0
"""Seconds to wait for another transaction, or for a database that became unavailable."""
_DIRECTORY = "directory"
"""The study's user attribute with the host and path of the sweep's files."""
_CONNECT_SECONDS = 5
_AGAIN_AFTER = 0.2
"""Seconds between two attempts to reach an unavailable database."""
_SCHEMA_LOCK = 0x67726164  # serializes two drivers that create tables in an empty database
_TRANSIENT = ("08", "57P0", "40001", "40P01")
"""Prefixes of the error codes after which a transaction may be retried: the connection was lost,
the server stops or starts, or two transactions conflicted."""
_ABSENT = ("42P01", "3F000")
_BUSY = "55P03"
_LIMITS: dict[str, Any] = {
    "connect_timeout": _CONNECT_SECONDS,
    # Either side detects within half a minute that the other host is gone.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": int(WAIT_SECONDS * 1000),
}
_SETTINGS = {
    "lock_timeout": int(WAIT_SECONDS * 1000),
    "tcp_keepalives_idle": 10,
    "tcp_keepalives_interval": 5,
    "tcp_keepalives_count": 3,
}
_FOREIGN_VERSION = f"""
SELECT 'schema_version' NOT IN (SELECT attname FROM pg_attribute WHERE attrelid = oid)
FROM pg_class WHERE oid = to_regclass('{tables.VERSION_TABLE}')
"""
"""Whether another program owns the table `version_info`, in which Optuna stores its version."""
_PARAMETER = re.compile(r":(\w+)")
_HOLDER = """
SELECT host, driver.pid, started FROM gradsweep_drivers AS driver
JOIN pg_locks ON pg_locks.pid = session WHERE sweep = :sweep AND locktype = 'advisory' AND granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND hashtextextended(sweep, 0) = (CAST(classid AS bigint) << 32) | CAST(objid AS bigint)
"""

_T = TypeVar("_T")


class SweepTaken(LedgerError):
    """The database already holds a sweep of that name."""


class PostgresConnection:
    """A psycopg2 connection whose statements write parameters as `:name`."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def execute(self, sql: str, parameters: Mapping[str, Any] = {}, /) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(_PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%")), parameters)
        return cursor


class LedgerDatabase:
    """One sweep's study in a PostgreSQL database; see `location.LedgerLocation`.

    Args:
        uri: The database's address, without a password.
        study: The sweep's name, which is unique in a database.
        directory: The sweep's directory.
    """

    sql = Dialect(infinity="'Infinity'", minus_infinity="'-Infinity'", starts="key LIKE '{text}%'")

    def __init__(self, uri: str, study: str, directory: Path) -> None:
        self.uri = uri
        self.study = study
        self.directory = directory
        self.study_attributes = {_DIRECTORY: f"{socket.gethostname()}:{directory}"}
        self.fencing_token: int | None = None
        """The token of the driver that may write; None until this object acquires the lock."""
        self.commit_count: int | None = None
        """How many transactions this driver has committed; None: read it from the database."""
        self._may_connect = False

    def __str__(self) -> str:
        return f"of sweep '{self.study}' in {self.uri}"

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions of psycopg2."""
        import psycopg2

        return (psycopg2.Error,)

    def connect(self) -> Any:
        """Return a new connection of psycopg2.

        Raises:
            LedgerError: The user has not named the database, or the sweep is another user's.
            LedgerRefused: psycopg2 is not installed.
            psycopg2.Error: The database does not answer, or refuses the connection.
        """
        self._check_access()
        try:
            import psycopg2  # takes 0.1 s to import, and is an optional dependency
        except ImportError:
            raise LedgerRefused(
                f"the ledger {self} cannot be used: psycopg2, the client library of PostgreSQL, "
                "is not installed; install it with: pip install 'gradsweep[postgres]'"
            ) from None
        address = re.sub(r"^postgresql\+\w+:", "postgresql:", self.uri)
        given = psycopg2.extensions.parse_dsn(secured(address))
        options = given.pop("options", None) or os.environ.get("PGOPTIONS", "")
        settings = [f"-c {name}={value}" for name, value in _SETTINGS.items()]
        name = f"gradsweep {self.study}"[:40]
        return psycopg2.connect(
            **{"fallback_application_name": name, **_LIMITS, **given},
            options=" ".join([options, *settings]),
        )

    def _check_access(self) -> None:
        if not self._may_connect:  # a driver that has connected once may always reconnect
            try:
                check_store(self.directory, self.uri)
            except StoreUntrusted as error:
                raise LedgerError(str(error)) from error
            self._may_connect = True

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise errors of psycopg2 as `LedgerError`."""
        try:
            yield
        except LedgerError:
            raise
        except Exception as error:
            if not isinstance(error, self.errors):
                raise
            raise self.refusal(error) from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[PostgresConnection]:
        """Open the ledger for one read transaction, which sees one consistent snapshot.

        Raises:
            LedgerError: The database cannot be used, or its content cannot be decoded.
        """
        try:
            with self.translate_errors(), contextlib.closing(self.connect()) as connection:
                connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
                yield PostgresConnection(connection)
        except LedgerError:
            raise
        except Exception as error:  # rows of another program can raise any error
            raise self.damaged(f"{type(error).__name__}: {error}") from error

    def num_trials(self) -> int | None:
        """Count the trials without changing anything; None when there is no study.

        Raises:
            LedgerError: The database cannot be used.
        """
        with self.reading() as db:
            if not _has_table(db, tables.STUDIES_TABLE):
                return None
            name = {"name": self.study}
            study = one(db.execute(tables.STUDY_QUERY, name))
            if study is None:
                return None
            return int(one(db.execute(tables.COUNT_STUDY_TRIALS_QUERY, {"study": study})))

    def check_available(self) -> None:
        """Check that a new sweep may be created here, without changing anything.

        Raises:
            LedgerError: The database cannot be used, or holds a sweep of that name.
            SweepLockedError: A driver on any host runs a sweep of that name.
        """
        if (holder := self.holder()) is not None:
            raise sweep_locked(self.directory, holder)
        with self.reading() as db:
            ours, versioned = (
                _has_table(db, name) for name in (tables.VERSION_TABLE, tables.REVISION_TABLE)
            )
            if one(db.execute(_FOREIGN_VERSION)) if ours else versioned:
                raise LedgerError(
                    f"storage.ledger: {self.uri} holds the tables of another program, such as "
                    "MLflow's; ledgers need a database of their own, because both note their "
                    "version in one table; create one (createdb sweeps) and name it"
                )
            if ours and versioned:
                check_tables(db, f"storage.ledger: {self.uri}")
            # Otherwise there are no tables, or a driver was killed while it created them: opening
            # the storage creates the rest.
        self._is_incomplete()

    def remove_incomplete(self, spec: Path) -> None:
        """Remove the empty study that a driver of this directory left when it died at creation.

        Raises:
            LedgerError: The study has trials, or it belongs to another directory.
        """
        del spec
        if self._is_incomplete():
            self._execute(tables.DELETE_EMPTY_STUDY)

    def recorded_directory(self) -> str | None:
        """Return the study's `HOST:DIRECTORY`; None if it has none, or there is no study.

        Raises:
            LedgerError: The database cannot be used.
        """
        with self.reading() as db:
            if not _has_table(db, tables.STUDIES_TABLE):
                return None
            stored = one(
                db.execute(tables.STUDY_ATTRIBUTE_QUERY, {"name": self.study, "key": _DIRECTORY})
            )
        return None if stored is None else str(json.loads(stored))

    def delete(self) -> None:
        """Delete the study and its trials, all or nothing. The caller holds the sweep's lock.

        The row with the fencing token stays, so that a later sweep of this name gets a higher one.

        Raises:
            LedgerError: The database cannot be used.
        """
        if self.num_trials() is not None:
            self._execute(tables.DELETE_STUDY)

    def _execute(self, statements: Iterable[str]) -> None:
        """Run statements on the study in one transaction."""
        with self.translate_errors(), contextlib.closing(self.connect()) as connection, connection:
            for statement in statements:
                PostgresConnection(connection).execute(statement, {"name": self.study})

    def _is_incomplete(self) -> bool:
        """Return whether there is an empty study of this directory, which may be removed.

        Raises:
            SweepTaken: There is a study with trials, or one of another directory.
        """
        count = self.num_trials()
        if count is None:
            return False
        directory = self.recorded_directory()
        if count == 0 and directory == self.study_attributes[_DIRECTORY]:
            return True
        where = f", whose files are at {directory}" if directory else ""
        # SQLAlchemy would use psycopg 3 for an address without a driver.
        storage = re.sub("^postgresql:", "postgresql+psycopg2:", self.uri)
        raise SweepTaken(
            f"{self.uri} holds a sweep '{self.study}' of {count} trials already{where}; a name is "
            "given once in a database; resume it there, choose another name with --name, or "
            f"remove it with: optuna delete-study --storage '{storage}' "
            f"--study-name '{self.study}'"
        )

    def holder(self) -> LockOwner | None:
        """Return the owner of the sweep's lock in this database; None when it is free.

        Raises:
            LedgerError: The database cannot be used.
        """
        with self.reading() as db:
            if not _has_table(db, "gradsweep_drivers"):
                return None
            row = db.execute(_HOLDER, {"sweep": self.study}).fetchone()
        return None if row is None else LockOwner(row[0], row[1], row[2], token="")

    def lost(self) -> LockLost:
        """Return the error of a driver whose lock another driver has acquired."""
        owner = self.holder()
        by = f" by {owner.describe()}" if owner else ""
        return lock_lost(f"the ledger {self} was taken over{by} from this driver", self.directory)

    def lost_commits_error(self, count: int) -> LedgerError:
        """Return the error about a database that lacks transactions that it had committed."""
        return LedgerRefused(
            f"the ledger {self} has lost {count} of the transactions that this driver had "
            "committed, as happens when a replica that lagged behind becomes the primary; nothing "
            "more is written; `sweep resume` continues from what is left, and names each trial "
            "directory that has no trial any more"
        )

    @contextlib.contextmanager
    def schema_lock(self) -> Iterator[PostgresConnection]:
        """Hold the lock that one driver needs to create tables in the database."""
        with self.translate_errors(), contextlib.closing(self.connect()) as connection:
            connection.autocommit = True
            db = PostgresConnection(connection)
            db.execute("SELECT pg_advisory_lock(:key)", {"key": _SCHEMA_LOCK})
            yield db

    def retry_transient(self, do: Callable[[], _T], *, before_again: Callable[[], None]) -> _T:
        """Retry while the database is unavailable, for at most `WAIT_SECONDS`.

        Args:
            do: Safe to run any number of times.
            before_again: Called before each retry.

        Raises:
            Exception: The error of the last attempt.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return do()
            except Exception as error:
                if not self._is_transient(error) or time.monotonic() >= deadline:
                    raise
                before_again()
                time.sleep(_AGAIN_AFTER)

    def refusal(self, error: Exception) -> LedgerError:
        """Translate an error of the storage: the ledger is busy, unusable or damaged."""
        cause = next(self._causes(error), None)
        code = getattr(cause, "pgcode", None) or ""
        lines = str(cause or error).strip().splitlines() or [type(error).__name__]
        # A host may have several addresses: take the line about the one that answered.
        reason = next((line for line in lines if "FATAL: " in line), lines[0])
        if code == _BUSY:
            return LedgerBusy(str(self), WAIT_SECONDS)
        if code in _ABSENT:
            return self.damaged(reason)
        return LedgerRefused(
            f"the ledger {self} cannot be used: {reason}; what it holds is untouched; start the "
            "database or correct storage.ledger; PostgreSQL reads PGUSER, PGPASSWORD and "
            "PGPASSFILE from the environment"
        )

    def damaged(self, reason: str) -> LedgerError:
        """Return the error about a ledger that cannot be read."""
        return LedgerError(
            f"the ledger {self} is not readable: {reason}; it is one Optuna study, the record of "
            "all trials; it is left as it is; restore the database from a backup"
        )

    def _is_transient(self, error: Exception) -> bool:
        """Whether a retry may succeed: after a lost or refused connection, or a conflict."""
        import psycopg2

        for cause in self._causes(error):
            # psycopg2 raises a bare `DatabaseError` if the connection ends during a statement.
            lost = type(cause) is psycopg2.DatabaseError
            if lost or isinstance(cause, psycopg2.OperationalError | psycopg2.InterfaceError):
                return not cause.pgcode or cause.pgcode.startswith(_TRANSIENT)
        # SQLAlchemy raises this in a transaction whose connection was lost before.
        return type(error.__cause__ or error).__name__ == "PendingRollbackError"

    def _causes(self, error: BaseException | None) -> Iterator[Any]:
        """Yield psycopg2's own errors from the chain of causes."""
        while error is not None:
            if isinstance(error, self.errors):
                yield error
            error = getattr(error, "orig", None) or error.__cause__


def _has_table(db: PostgresConnection, name: str) -> bool:
    return one(db.execute("SELECT to_regclass(:name)", {"name": name})) is not None
