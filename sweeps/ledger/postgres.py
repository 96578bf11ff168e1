"""Ledgers in a PostgreSQL database, one Optuna study for each sweep: connecting, looking without
changing anything, and saying clearly what is wrong.

Beside Optuna's tables there is one of our own, `gradsweep_drivers`, a row for each sweep: whose
turn it is to write, and how many transactions have been committed in that turn (see
`database_lock` and `ledger.storage`). What must not live here: what a ledger holds (`ledger`,
`ledger.view`), Optuna, and SQLAlchemy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sweeps.ledger.dialect import Dialect, check_tables, one
from sweeps.paths import LedgerBusy, LedgerError, LedgerRefused
from sweeps.store_access import check_store
from sweeps.sweep_lock import LockLost, LockOwner, SweepLockedError
from tracking.trusted_stores import StoreUntrusted, secured

if TYPE_CHECKING:
    from sweeps.ledger.database_lock import DatabaseLock

WAIT_SECONDS = 30.0
"""How long another transaction, or a database that was there before, is waited for."""
_DIRECTORY = "directory"
"""A study's note: where the sweep's files are."""
_CONNECT_SECONDS = 5
_AGAIN_AFTER = 0.2
"""Seconds between two tries at a database that is away."""
_MAKING_TABLES = 0x67726164  # a lock for two drivers that meet in an empty database
_TRANSIENT = ("08", "57P0", "40001", "40P01")
"""What codes of errors begin with after which the same transaction may be tried again: the
connection was lost, the server ends or starts, two transactions met."""
_ABSENT = ("42P01", "3F000")
_BUSY = "55P03"
_LIMITS: dict[str, Any] = {
    "connect_timeout": _CONNECT_SECONDS,
    # A host that is gone without a word is noticed within half a minute, by either side.
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
_FOREIGN_VERSION = """
SELECT 'schema_version' NOT IN (SELECT attname FROM pg_attribute WHERE attrelid = oid)
FROM pg_class WHERE oid = to_regclass('version_info')
"""
"""Whether the table in which Optuna notes its version is another program's."""
_PARAMETER = re.compile(r":(\w+)")
_HOLDER = """
SELECT host, driver.pid, started FROM gradsweep_drivers AS driver
JOIN pg_locks ON pg_locks.pid = session WHERE sweep = :sweep AND locktype = 'advisory' AND granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND hashtextextended(sweep, 0) = (CAST(classid AS bigint) << 32) | CAST(objid AS bigint)
"""

_T = TypeVar("_T")


class SweepTaken(LedgerError):
    """The database holds a sweep of that name already."""


class Rows:
    """A connection of psycopg2 that takes parameters as `:name`."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def execute(self, sql: str, parameters: Mapping[str, Any] = {}, /) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(_PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%")), parameters)
        return cursor


class LedgerDatabase:
    """One sweep's study in a PostgreSQL database; see `ledger_place.Place`.

    Args:
        uri: The database's address, without a password.
        study: The sweep's name, which is given once in a database.
        directory: Where the sweep's files are.
    """

    sql = Dialect(infinity="'Infinity'", minus_infinity="'-Infinity'", starts="key LIKE '{text}%'")

    def __init__(self, uri: str, study: str, directory: Path) -> None:
        self.uri = uri
        self.study = study
        self.directory = directory
        self.notes = {_DIRECTORY: f"{socket.gethostname()}:{directory}"}
        self.turn: int | None = None
        """Whose number writes; None until the sweep's lock is taken through this object."""
        self.written: int | None = None
        """How many transactions were committed in that turn; None where that must be asked."""
        self._may_connect = False

    def __str__(self) -> str:
        return f"of sweep '{self.study}' in {self.uri}"

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What the driver raises."""
        import psycopg2

        return (psycopg2.Error,)

    def connect(self) -> Any:
        """Return a new connection of psycopg2.

        Raises:
            LedgerError: The user has not named the database, or the sweep is another user's.
            LedgerRefused: The driver is not installed.
            psycopg2.Error: The database does not answer, or refuses.
        """
        self._check_access()
        try:
            import psycopg2  # 0.1 s, and not every installation has it
        except ImportError:
            raise LedgerRefused(
                f"the ledger {self} cannot be used: psycopg2 is not installed, by which "
                "PostgreSQL is asked; install it with: pip install 'gradsweep[postgres]'"
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
        if not self._may_connect:  # a driver that has connected once is not refused later
            try:
                check_store(self.directory, self.uri)
            except StoreUntrusted as error:
                raise LedgerError(str(error)) from error
            self._may_connect = True

    @contextlib.contextmanager
    def clear_errors(self) -> Iterator[None]:
        """Make the database's errors errors of the ledger."""
        try:
            yield
        except LedgerError:
            raise
        except Exception as error:
            if not isinstance(error, self.errors):
                raise
            raise self.refusal(error) from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[Rows]:
        """Open it for one read transaction: what it sees belongs together.

        Raises:
            LedgerError: The database cannot be used, or what it holds makes no sense.
        """
        try:
            with self.clear_errors(), contextlib.closing(self.connect()) as connection:
                connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
                yield Rows(connection)
        except LedgerError:
            raise
        except Exception as error:  # whatever a decoder says of what it was not written by us
            raise self.damaged(f"{type(error).__name__}: {error}") from error

    def num_trials(self) -> int | None:
        """Count the sweep's trials without changing anything; None when it has no study.

        Raises:
            LedgerError: The database cannot be used.
        """
        with self.reading() as db:
            if not _has_table(db, "studies"):
                return None
            asked = {"name": self.study}
            study = one(db.execute("SELECT study_id FROM studies WHERE study_name = :name", asked))
            if study is None:
                return None
            counting = "SELECT COUNT(*) FROM trials WHERE study_id = :study"
            return int(one(db.execute(counting, {"study": study})))

    def check_available(self) -> None:
        """Make sure that a sweep may be begun here; nothing is changed.

        Raises:
            LedgerError: The database cannot be used, or holds a sweep of that name.
            SweepHeld: A driver runs one of that name, on whatever host.
        """
        if (holder := self.holder()) is not None:
            raise SweepLockedError(self.directory, holder)
        with self.reading() as db:
            ours, versioned = (_has_table(db, n) for n in ("version_info", "alembic_version"))
            if one(db.execute(_FOREIGN_VERSION)) if ours else versioned:
                raise LedgerError(
                    f"storage.ledger: {self.uri} holds the tables of another program, such as "
                    "MLflow's; ledgers need a database of their own, because both note their "
                    "version in one table; create one (createdb sweeps) and name it"
                )
            if ours and versioned:
                check_tables(db, f"storage.ledger: {self.uri}")
            # Else there is none, or a driver was killed that made them: opening makes the rest.
        self._refuse_another()

    def remove_incomplete(self, spec: Path) -> None:
        """Remove what a driver of this directory left that died before the sweep existed.

        Raises:
            LedgerError: There are trials, or the study is not of this directory.
        """
        del spec
        if not self._refuse_another():
            return
        study = "SELECT study_id FROM studies WHERE study_name = :name"
        with self.clear_errors(), contextlib.closing(self.connect()) as connection, connection:
            for table in ("study_directions", "study_user_attributes", "study_system_attributes"):
                Rows(connection).execute(
                    f"DELETE FROM {table} WHERE study_id = ({study})", {"name": self.study}
                )
            Rows(connection).execute(
                "DELETE FROM studies WHERE study_name = :name", {"name": self.study}
            )

    def _refuse_another(self) -> bool:
        """Return whether there is a study that nobody will miss.

        Raises:
            SweepTaken: There is one that somebody may.
        """
        count = self.num_trials()
        if count is None:
            return False
        with self.reading() as db:
            told = one(
                db.execute(
                    "SELECT value_json FROM study_user_attributes JOIN studies USING (study_id) "
                    "WHERE study_name = :name AND key = :key",
                    {"name": self.study, "key": _DIRECTORY},
                )
            )
        directory = None if told is None else json.loads(told)
        if count == 0 and directory == self.notes[_DIRECTORY]:
            return True
        where = f", whose files are at {directory}" if directory else ""
        # SQLAlchemy takes an address without a driver for that of psycopg 3.
        storage = re.sub("^postgresql:", "postgresql+psycopg2:", self.uri)
        raise SweepTaken(
            f"{self.uri} holds a sweep '{self.study}' of {count} trials already{where}; a name is "
            "given once in a database; resume it there, choose another name with --name, or "
            f"remove it with: optuna delete-study --storage '{storage}' "
            f"--study-name '{self.study}'"
        )

    def lock(self) -> DatabaseLock:
        """The lock of whoever may write, on whatever host."""
        from sweeps.ledger.database_lock import DatabaseLock

        return DatabaseLock(self)

    def holder(self) -> LockOwner | None:
        """Who holds that lock; None when nobody does.

        Raises:
            LedgerError: The database cannot be used.
        """
        with self.reading() as db:
            if not _has_table(db, "gradsweep_drivers"):
                return None
            row = db.execute(_HOLDER, {"sweep": self.study}).fetchone()
        return None if row is None else LockOwner(row[0], row[1], row[2], token="")

    def lost(self) -> LockLost:
        """What ends a driver whose turn it is no more."""
        taker = self.holder()
        by = f" by {taker.describe()}" if taker else ""
        return LockLost(f"the ledger {self} was taken over{by} from this driver", self.directory)

    def lost_commits_error(self, count: int) -> LedgerError:
        """Return the error about a database that lacks transactions which it had committed."""
        return LedgerRefused(
            f"the ledger {self} has lost {count} of the transactions that this driver had "
            "committed, as it happens when a copy that lagged behind takes over; nothing is "
            "written on top of what is left; resume, which goes on from there and names what is "
            "in the way of a trial that was lost"
        )

    @contextlib.contextmanager
    def schema_lock(self) -> Iterator[Rows]:
        """Be the only one who makes tables in the database."""
        with self.clear_errors(), contextlib.closing(self.connect()) as connection:
            connection.autocommit = True
            rows = Rows(connection)
            rows.execute("SELECT pg_advisory_lock(:key)", {"key": _MAKING_TABLES})
            yield rows

    def retry_transient(self, do: Callable[[], _T], *, before_again: Callable[[], None]) -> _T:
        """Do something again and again for as long as the database is away, within bounds.

        Args:
            do: May be done any number of times.
            before_again: Called when the connection is found to be lost.

        Raises:
            Exception: What it raised last.
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
        """Return what an error of the storage below means: busy, not usable, or damaged."""
        cause = next(self._causes(error), None)
        code = getattr(cause, "pgcode", None) or ""
        lines = str(cause or error).strip().splitlines() or [type(error).__name__]
        # Of several addresses of a host, the one at which a server answered.
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
        """Whether the same may succeed in a moment: the connection was lost or refused, or two
        transactions met.
        """
        import psycopg2

        for cause in self._causes(error):
            # Of a connection that ends under a statement it says no more than `DatabaseError`.
            lost = type(cause) is psycopg2.DatabaseError
            if lost or isinstance(cause, psycopg2.OperationalError | psycopg2.InterfaceError):
                return not cause.pgcode or cause.pgcode.startswith(_TRANSIENT)
        # SQLAlchemy's, of a transaction whose connection was lost before.
        return type(error.__cause__ or error).__name__ == "PendingRollbackError"

    def _causes(self, error: BaseException | None) -> Iterator[Any]:
        """Yield the driver's own errors below those of the layers above it."""
        while error is not None:
            if isinstance(error, self.errors):
                yield error
            error = getattr(error, "orig", None) or error.__cause__


def _has_table(db: Rows, name: str) -> bool:
    return one(db.execute("SELECT to_regclass(:name)", {"name": name})) is not None
