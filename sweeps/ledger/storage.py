"""Optuna's relational storage, in one SQLite file or in a PostgreSQL database: what is stored
survives a power loss, what belongs together is one transaction, and the search space may be edited
between two drivers.

What must not live here: opening a ledger, and what is stored (`ledger`).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution

from sweeps.ledger import file as ledger_file
from sweeps.ledger.database import LedgerDatabase
from sweeps.ledger.file import LedgerFile
from sweeps.ledger.place import Place

_T = TypeVar("_T")


class _Durable(sqlite3.Connection):
    """Syncs the directory too once a transaction's journal is gone: otherwise a power loss may
    bring the journal back, and with it take the transaction back.

    Optuna commits after each value; within `at_once` these commits are parts of one transaction.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.execute("PRAGMA synchronous = EXTRA")
        self._at_once = False

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Store all that is committed within, or nothing."""
        self.execute("BEGIN IMMEDIATE")
        self.execute("SAVEPOINT part")
        self._at_once = True
        try:
            yield
            super().commit()
        finally:
            self._at_once = False
            super().rollback()  # of what was not committed; the last commit is behind it

    def commit(self) -> None:
        if self._at_once:
            self.execute("RELEASE part")
            self.execute("SAVEPOINT part")
        else:
            super().commit()

    def rollback(self) -> None:
        if not self._at_once:
            super().rollback()
        elif self.in_transaction:  # SQLite itself takes all back when the disk is full
            self.execute("ROLLBACK TO part")


class EditableStorage(optuna.storages.RDBStorage):
    """Stores each parameter with the distribution that it was drawn from, whatever the first trial
    of the study drew it from.

    Optuna refuses a parameter that has changed its kind or its choices, because samplers would
    trip over it. Here samplers are never shown the stored trials as they are (see `proposals`).
    There is no documented entrance for this; a test edits a space through a real ledger.

    It is used by one thread.
    """

    def look(self, work: Callable[[], _T]) -> _T:
        """Do what only reads."""
        return work()

    def transact(self, work: Callable[[], _T]) -> _T:
        """Store all that `work` stores, or nothing of it."""
        raise NotImplementedError

    def _set_trial_param_without_commit(
        self,
        session: Any,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
        previous_distribution: BaseDistribution | None = None,
    ) -> None:
        del previous_distribution
        super()._set_trial_param_without_commit(
            session,
            trial_id,
            param_name,
            param_value_internal,
            distribution,
            previous_distribution=distribution,
        )


class _FileStorage(EditableStorage):
    """In a file of its own; the disk is waited for once a transaction."""

    def __init__(self, place: LedgerFile) -> None:
        # Looking commands read while the driver writes; SQLite then waits for the other's
        # transaction instead of failing.
        arguments = {"timeout": ledger_file.WAIT_SECONDS, "factory": _Durable}
        super().__init__(
            f"sqlite:///{place.path}",
            # The connection that was returned last comes next: the one with the open transaction.
            engine_kwargs={"connect_args": arguments, "pool_use_lifo": True},
        )

    def transact(self, work: Callable[[], _T]) -> _T:
        with contextlib.closing(self.engine.raw_connection()) as pooled:
            connection: Any = pooled.driver_connection  # which the pool hands out next
        with connection.at_once():
            return work()


class _DatabaseStorage(EditableStorage):
    """In a database with others; only the holder of the sweep's lock writes.

    A transaction first counts itself in its driver's row. There it meets whoever took the lock
    over, and there it shows whether one was committed of which the connection could not tell
    any more: each is applied once, however often the database goes away.
    """

    def __init__(self, place: LedgerDatabase) -> None:
        self._place = place
        self._within = False
        with place.making_tables():
            super().__init__("postgresql+psycopg2://", {"creator": place.connect})

    def look(self, work: Callable[[], _T]) -> _T:
        if self._within:
            return work()
        return self._place.patiently(work, before_again=self.engine.dispose)

    def transact(self, work: Callable[[], _T]) -> _T:
        assert not self._within, "one transaction is not part of another"
        results: list[_T] = []
        try:
            result = self._place.patiently(
                lambda: self._try(work, results), before_again=self.engine.dispose
            )
        except BaseException:  # whether the last commit was made is not known; raised again
            self._place.written = None
            raise
        assert self._place.written is not None
        self._place.written += 1
        return result

    def _try(self, work: Callable[[], _T], results: list[_T]) -> _T:
        """Try a transaction once.

        Args:
            results: What it came to when it was last tried as far as its commit.
        """
        with self.engine.connect() as connection, connection.begin() as transaction:
            count = self._count(connection)
            if self._place.written is None:
                self._place.written = count - 1
            if count > self._place.written + 1:
                transaction.rollback()  # of this count: the last try was committed
                return results[-1]
            with self._within_one(connection):
                results.append(work())
        return results[-1]

    def _count(self, connection: sqlalchemy.Connection) -> int:
        assert self._place.turn is not None, "the lock comes first"
        written = connection.scalar(
            sqlalchemy.text(
                "UPDATE gradsweep_drivers SET written = written + 1 "
                "WHERE sweep = :sweep AND turn = :turn RETURNING written"
            ),
            {"sweep": self._place.study, "turn": self._place.turn},
        )
        if written is None:
            raise self._place.lost()
        return int(written)

    @contextlib.contextmanager
    def _within_one(self, connection: sqlalchemy.Connection) -> Iterator[None]:
        """Make Optuna's transactions parts of the connection's."""
        self.scoped_session.remove()
        self.scoped_session.configure(bind=connection, join_transaction_mode="create_savepoint")
        self._within = True
        try:
            yield
        finally:
            self._within = False
            self.scoped_session.remove()
            self.scoped_session.configure(
                bind=self.engine, join_transaction_mode="conditional_savepoint"
            )


def open_storage(place: Place) -> EditableStorage:
    """Open the storage at a place; what is missing of its tables is made."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if isinstance(place, LedgerFile):
        return _FileStorage(place)
    assert isinstance(place, LedgerDatabase)
    return _DatabaseStorage(place)
