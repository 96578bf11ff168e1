"""Extend Optuna's RDB storage with durable transactions and an editable search space.

Stored data survives a power loss, one method of the ledger is one transaction, and the search
space may change between two drivers. What must not live here: opening a ledger, and what it
stores (`ledger`).
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from sweeps.ledger import sqlite as ledger_file
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
    may use the storage at a time. The disk syncs once per transaction. Tables that the file lacks
    are created.
    """

    def __init__(self, path: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Other commands read while the driver writes; SQLite then waits for the driver's
        # transaction instead of failing.
        connect = functools.partial(
            sqlite3.connect,
            path,
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
        self._writes = False

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
        with contextlib.closing(self.database.raw_connection()) as pooled:
            connection: Any = pooled.driver_connection  # the pool hands it out next
        with connection.transaction():
            return work()

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Store a state. Optuna only returns false if the database rejects it."""
        if not super().set_trial_state_values(trial_id, state, values):
            raise StorageInternalError(f"the database rejects the state {state.name} of a trial")
        return True
