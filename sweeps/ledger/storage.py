"""Extend Optuna's RDB storage with durable transactions and an editable search space.

Stored data survives a power loss, one method of the ledger is one transaction, and the search
space may change between two drivers. SQLite and PostgreSQL each have a subclass. What must not
live here: opening a ledger, and what it stores (`ledger`).
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from sweeps.errors import LedgerRefused
from sweeps.ledger import sqlite as ledger_file
from sweeps.ledger.location import LedgerLocation
from sweeps.ledger.postgres import LedgerDatabase
from sweeps.ledger.sqlite import LedgerFile
from sweeps.optuna_compat.storage import EditableParamsStorage

_T = TypeVar("_T")


class _DurableConnection(sqlite3.Connection):
    """Sync the directory after SQLite removes a transaction's journal.

    Otherwise a power loss may restore the journal, and SQLite rolls the transaction back. Optuna
    commits after each value; within `transaction` these commits become savepoints.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.execute("PRAGMA synchronous = EXTRA")
        self._inside_transaction = False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Store all commits within as one transaction, or none of them."""
        self.execute("BEGIN IMMEDIATE")
        self.execute("SAVEPOINT part")
        self._inside_transaction = True
        try:
            yield
            super().commit()
        finally:
            self._inside_transaction = False
            super().rollback()  # after an error; after the commit it does nothing

    def commit(self) -> None:
        if self._inside_transaction:
            self.execute("RELEASE part")
            self.execute("SAVEPOINT part")
        else:
            super().commit()

    def rollback(self) -> None:
        if not self._inside_transaction:
            super().rollback()
        elif self.in_transaction:  # SQLite itself rolls back when the disk is full
            self.execute("ROLLBACK TO part")


class EditableRDBStorage(EditableParamsStorage):
    """Store each parameter with its own distribution, whatever the study's first trial had.

    Samplers never read the stored trials directly (see `search.shown_trials`). Only one thread
    may use the storage at a time.
    """

    def __init__(self, url: str, engine_kwargs: dict[str, Any]) -> None:
        super().__init__(url, engine_kwargs)
        self._writes = False

    def read(self, work: Callable[[], _T]) -> _T:
        """Run `work`, which only reads."""
        return work()

    def transact(self, work: Callable[[], _T]) -> _T:
        """Run `work` in one transaction; a nested call is a part of the outer transaction."""
        if self._writes:
            return work()
        self._writes = True
        try:
            return self._transact(work)
        finally:
            self._writes = False

    def _transact(self, work: Callable[[], _T]) -> _T:
        raise NotImplementedError

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Store a state. Optuna only returns false if the database rejects it."""
        if not super().set_trial_state_values(trial_id, state, values):
            raise StorageInternalError(f"the database rejects the state {state.name} of a trial")
        return True


class _FileStorage(EditableRDBStorage):
    """Storage in a SQLite file; the disk syncs once per transaction."""

    def __init__(self, location: LedgerFile) -> None:
        # Other commands read while the driver writes; SQLite then waits for the driver's
        # transaction instead of failing.
        connect = functools.partial(
            sqlite3.connect,
            location.path,
            timeout=ledger_file.WAIT_SECONDS,
            factory=_DurableConnection,
            check_same_thread=False,
        )
        super().__init__(
            "sqlite:///ledger.db",  # SQLAlchemy would parse the path itself as a URL
            # LIFO: the pool hands out the connection that was returned last, which has the open
            # transaction.
            {"creator": connect, "pool_use_lifo": True},
        )

    def _transact(self, work: Callable[[], _T]) -> _T:
        with contextlib.closing(self.database.raw_connection()) as pooled:
            connection: Any = pooled.driver_connection  # the pool hands it out next
        with connection.transaction():
            return work()


class _DatabaseStorage(EditableRDBStorage):
    """Storage in a shared PostgreSQL database; only the owner of the sweep's lock writes.

    A transaction first increments the counter in its driver's row. This UPDATE fences old drivers:
    it fails if another driver has acquired the lock. Its counter also reveals commits whose reply
    was lost, so each transaction is applied exactly once, even if the connection breaks. If the
    database has fewer commits than this driver has made, nothing is written.
    """

    def __init__(self, location: LedgerDatabase) -> None:
        self._location = location
        self._within = False
        with location.schema_lock():
            super().__init__("postgresql+psycopg2://", {"creator": location.connect})

    def read(self, work: Callable[[], _T]) -> _T:
        if self._within:
            return work()
        return self._location.retry_transient(work, before_again=self.database.dispose)

    def _transact(self, work: Callable[[], _T]) -> _T:
        assert not self._within, "one transaction is not part of another"
        results: list[_T] = []
        try:
            result = self._location.retry_transient(
                lambda: self._try(work, results), before_again=self.database.dispose
            )
        except LedgerRefused:  # commits are lost for good: keep the count
            raise
        except BaseException:  # unknown whether the last commit was made
            self._location.commit_count = None
            raise
        assert self._location.commit_count is not None
        self._location.commit_count += 1
        return result

    def _try(self, work: Callable[[], _T], results: list[_T]) -> _T:
        """Attempt a transaction once.

        Args:
            work: What the transaction does.
            results: The results of earlier attempts that reached their commit.
        """
        with self.database.connect() as connection, connection.begin() as transaction:
            count = self._count(connection)
            if self._location.commit_count is None:
                self._location.commit_count = count - 1
            if count > self._location.commit_count + 1:
                transaction.rollback()  # undo the counter: the last attempt was committed
                return results[-1]
            if count <= self._location.commit_count:
                raise self._location.lost_commits_error(self._location.commit_count + 1 - count)
            with self._within_one(connection):
                results.append(work())
        return results[-1]

    def _count(self, connection: sqlalchemy.Connection) -> int:
        assert self._location.fencing_token is not None, "the lock comes first"
        written = connection.scalar(
            sqlalchemy.text(
                "UPDATE gradsweep_drivers SET written = written + 1 "
                "WHERE sweep = :sweep AND turn = :turn RETURNING written"
            ),
            {"sweep": self._location.study, "turn": self._location.fencing_token},
        )
        if written is None:
            raise self._location.lost()
        return int(written)

    @contextlib.contextmanager
    def _within_one(self, connection: sqlalchemy.Connection) -> Iterator[None]:
        """Make Optuna's transactions savepoints of the connection's transaction."""
        with self.within_connection(connection):
            self._within = True
            try:
                yield
            finally:
                self._within = False


def open_storage(location: LedgerLocation) -> EditableRDBStorage:
    """Open the storage at a location, and create the tables that it lacks."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if isinstance(location, LedgerFile):
        return _FileStorage(location)
    assert isinstance(location, LedgerDatabase)
    return _DatabaseStorage(location)
