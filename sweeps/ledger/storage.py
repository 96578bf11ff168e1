"""Optuna's relational storage, in one SQLite file or in a PostgreSQL database: what is stored
survives a power loss, what belongs together is one transaction, and the search space may be edited
between two drivers.

What must not live here: opening a ledger, and what is stored (`ledger`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.orm import Session

from sweeps.ledger import sqlite as ledger_file
from sweeps.ledger.bulk_writes import (
    end_trial,
    insert_report,
    insert_trial,
    json_roundtrip,
    set_user_attribute,
)
from sweeps.ledger.location import LedgerLocation
from sweeps.ledger.postgres import LedgerDatabase
from sweeps.ledger.sqlite import LedgerFile
from sweeps.paths import LedgerRefused

_T = TypeVar("_T")


class _DurableConnection(sqlite3.Connection):
    """Syncs the directory too once a transaction's journal is gone: otherwise a power loss may
    bring the journal back, and with it take the transaction back.

    Optuna commits after each value; within `at_once` these commits are parts of one transaction.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.execute("PRAGMA synchronous = EXTRA")
        self._inside_transaction = False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Store all that is committed within, or nothing."""
        self.execute("BEGIN IMMEDIATE")
        self.execute("SAVEPOINT part")
        self._inside_transaction = True
        try:
            yield
            super().commit()
        finally:
            self._inside_transaction = False
            super().rollback()  # of what was not committed; the last commit is behind it

    def commit(self) -> None:
        if self._inside_transaction:
            self.execute("RELEASE part")
            self.execute("SAVEPOINT part")
        else:
            super().commit()

    def rollback(self) -> None:
        if not self._inside_transaction:
            super().rollback()
        elif self.in_transaction:  # SQLite itself takes all back when the disk is full
            self.execute("ROLLBACK TO part")


class EditableRDBStorage(optuna.storages.RDBStorage):
    """Stores each parameter with the distribution that it was drawn from, whatever the first trial
    of the study drew it from.

    Optuna refuses a parameter that has changed its kind or its choices, because samplers would
    trip over it. Here samplers are never shown the stored trials as they are (see `proposals`).
    There is no documented entrance for this; a test edits a space through a real ledger.

    A trial is read with seven statements, and was read eight times from its start to its end. The
    one driver that may write remembers the open trials that it read or made while it wrote, and
    the last one that it ended, and writes with few statements what it knows (`statements`);
    whoever only looks remembers nothing, for others write.

    It is used by one thread at a time.
    """

    def __init__(self, url: str, engine_kwargs: dict[str, Any]) -> None:
        super().__init__(url, engine_kwargs)
        self._open: dict[int, FrozenTrial] = {}
        self._ended: FrozenTrial | None = None
        self._ids: dict[tuple[int, int], int] = {}
        self._writes = False

    def read(self, work: Callable[[], _T]) -> _T:
        """Do what only reads."""
        return work()

    def transact(self, work: Callable[[], _T]) -> _T:
        """Store all that `work` stores, or nothing of it; within another one, a part of that."""
        if self._writes:
            return work()
        self._writes = True
        try:
            return self._transact(work)
        except BaseException:  # what is stored now is to be read again; raised again
            self._forget()
            raise
        finally:
            self._writes = False

    def _transact(self, work: Callable[[], _T]) -> _T:
        raise NotImplementedError

    def _forget(self) -> None:
        self._open.clear()
        self._ids.clear()
        self._ended = None

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session]:
        with self.scoped_session() as session, session.begin():
            yield session

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Add a trial."""
        if template_trial is None or not self._writes:
            return super().create_new_trial(study_id, template_trial)
        with self._session() as session:
            trial = insert_trial(session, study_id, template_trial)
        self._open[trial._trial_id] = trial
        self._ids[study_id, trial.number] = trial._trial_id
        return trial._trial_id

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return a trial, which nobody may change."""
        known = self._open.get(trial_id)
        if known is None and self._ended is not None and self._ended._trial_id == trial_id:
            known = self._ended
        if known is None:
            known = super().get_trial(trial_id)
            if self._writes and not known.state.is_finished():
                self._open[trial_id] = known
        return known

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        """Return a trial's id, which stays what it is."""
        key = (study_id, trial_number)
        if key not in self._ids:
            self._ids[key] = super().get_trial_id_from_study_id_trial_number(*key)
        return self._ids[key]

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Store an attribute."""
        if not (known := self._open.get(trial_id)):
            super().set_trial_user_attr(trial_id, key, value)
            return
        with self._session() as session:
            set_user_attribute(session, trial_id, key, value)
        changed = self._open[trial_id] = copy.copy(known)
        changed.user_attrs = {**known.user_attrs, key: json_roundtrip(value)}

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Store a report."""
        known = self._open.get(trial_id)
        if known is None or step in known.intermediate_values:
            self._open.pop(trial_id, None)
            super().set_trial_intermediate_value(trial_id, step, intermediate_value)
            return
        with self._session() as session:
            insert_report(session, trial_id, step, intermediate_value)
        changed = self._open[trial_id] = copy.copy(known)
        changed.intermediate_values = {**known.intermediate_values, step: intermediate_value}

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Store an attribute of Optuna's own."""
        self._open.pop(trial_id, None)
        super().set_trial_system_attr(trial_id, key, value)

    def set_trial_param(
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
    ) -> None:
        """Store a parameter."""
        self._open.pop(trial_id, None)
        super().set_trial_param(trial_id, param_name, param_value_internal, distribution)

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Store a state."""
        known = self._open.pop(trial_id, None)
        if known is None or not state.is_finished():
            return super().set_trial_state_values(trial_id, state, values)
        with self._session() as session:
            self._ended = end_trial(session, known, state, values)
        return True

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


class _FileStorage(EditableRDBStorage):
    """In a file of its own; the disk is waited for once a transaction."""

    def __init__(self, location: LedgerFile) -> None:
        # Looking commands read while the driver writes; SQLite then waits for the other's
        # transaction instead of failing.
        connect = functools.partial(
            sqlite3.connect,
            location.path,
            timeout=ledger_file.WAIT_SECONDS,
            factory=_DurableConnection,
            check_same_thread=False,
        )
        super().__init__(
            "sqlite:///ledger.db",  # the path itself would be read as parts of an address
            # The connection that was returned last comes next: the one with the open transaction.
            {"creator": connect, "pool_use_lifo": True},
        )

    def _transact(self, work: Callable[[], _T]) -> _T:
        with contextlib.closing(self.engine.raw_connection()) as pooled:
            connection: Any = pooled.driver_connection  # which the pool hands out next
        with connection.transaction():
            return work()


class _DatabaseStorage(EditableRDBStorage):
    """In a database with others; only the holder of the sweep's lock writes.

    A transaction first counts itself in its driver's row. There it meets whoever took the lock
    over, and there it shows whether one was committed of which the connection could not tell
    any more: each is applied once, however often the database goes away. Where it shows that fewer
    were committed than this driver has seen, nothing is written.
    """

    def __init__(self, location: LedgerDatabase) -> None:
        self._location = location
        self._within = False
        with location.schema_lock():
            super().__init__("postgresql+psycopg2://", {"creator": location.connect})

    def read(self, work: Callable[[], _T]) -> _T:
        if self._within:
            return work()
        return self._location.retry_transient(work, before_again=self.engine.dispose)

    def _transact(self, work: Callable[[], _T]) -> _T:
        assert not self._within, "one transaction is not part of another"
        results: list[_T] = []
        try:
            result = self._location.retry_transient(
                lambda: self._try(work, results), before_again=self._begin_anew
            )
        except LedgerRefused:  # what the database has lost it lacks the next time, too
            raise
        except BaseException:  # whether the last commit was made is not known; raised again
            self._location.commit_count = None
            raise
        assert self._location.commit_count is not None
        self._location.commit_count += 1
        return result

    def _begin_anew(self) -> None:
        self._forget()  # the last try has changed it, and may not have been committed
        self.engine.dispose()

    def _try(self, work: Callable[[], _T], results: list[_T]) -> _T:
        """Try a transaction once.

        Args:
            results: What it came to when it was last tried as far as its commit.
        """
        with self.engine.connect() as connection, connection.begin() as transaction:
            count = self._count(connection)
            if self._location.commit_count is None:
                self._location.commit_count = count - 1
            if count > self._location.commit_count + 1:
                transaction.rollback()  # of this count: the last try was committed
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


def open_storage(location: LedgerLocation) -> EditableRDBStorage:
    """Open the storage at a location; what is missing of its tables is made."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if isinstance(location, LedgerFile):
        return _FileStorage(location)
    assert isinstance(location, LedgerDatabase)
    return _DatabaseStorage(location)
