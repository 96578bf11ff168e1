"""Optuna's relational storage in one SQLite file: what is stored survives a power loss, what
belongs together is one transaction, and the search space may be edited between two drivers.

What must not live here: opening a ledger, and what is stored (`ledger`).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution

from sweeps import ledger_file


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

    def __init__(self, path: Path) -> None:
        # Looking commands read while the driver writes; SQLite then waits for the other's
        # transaction instead of failing.
        arguments = {"timeout": ledger_file.WAIT_SECONDS, "factory": _Durable}
        super().__init__(
            f"sqlite:///{path}",
            # The connection that was returned last comes next: the one with the open transaction.
            engine_kwargs={"connect_args": arguments, "pool_use_lifo": True},
        )

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Store all that is stored within, or nothing; the disk is waited for once."""
        with contextlib.closing(self.engine.raw_connection()) as pooled:
            connection: Any = pooled.driver_connection  # which the pool hands out next
        with connection.at_once():
            yield

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
