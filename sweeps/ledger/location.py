"""Choose where a sweep's ledger is: in its own SQLite file, or in a shared PostgreSQL database.

The protocol `LedgerLocation` states what both can do. No other module makes this choice or creates
the lock in the database. All writes go through the location's storage (`ledger.storage`). What
must not live here: SQLite (`ledger.sqlite`), PostgreSQL (`ledger.postgres`), and Optuna.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from sweeps.errors import LedgerError
from sweeps.ledger.database_lock import DatabaseLock
from sweeps.ledger.dialect import Dialect, ReadConnection
from sweeps.ledger.postgres import LedgerDatabase
from sweeps.ledger.sqlite import LedgerFile
from sweeps.paths import SweepPaths
from sweeps.spec.spec import SweepSpec
from sweeps.sweep_lock import LockOwner, SecondaryLock, is_held, read_holder


class LedgerLocation(Protocol):
    """A ledger's file or database. `str` returns the name that messages use."""

    @property
    def study(self) -> str:
        """The name of its Optuna study."""

    @property
    def sql(self) -> Dialect:
        """The SQL that differs between databases."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions of the database's client library."""

    @property
    def study_attributes(self) -> Mapping[str, str]:
        """The user attributes that a new study gets."""

    def reading(self) -> AbstractContextManager[ReadConnection]:
        """Open the ledger for one read transaction, which sees one consistent snapshot.

        Raises:
            LedgerError: There is no ledger, or the database cannot be used.
        """

    def num_trials(self) -> int | None:
        """Count the trials without changing anything; None when there is no study.

        Raises:
            LedgerError: There is no ledger, or the database cannot be used.
        """

    def refusal(self, error: Exception) -> LedgerError:
        """Translate an error of the storage: the ledger is busy, unusable or damaged."""

    def damaged(self, reason: str) -> LedgerError:
        """Return the error about a ledger that cannot be read."""

    def check_available(self) -> None:
        """Check that a new sweep may be created here, without changing anything.

        Raises:
            LedgerError: The database cannot be used, or holds a sweep of that name.
            SweepLockedError: A driver on any host runs a sweep of that name.
        """

    def remove_incomplete(self, spec: Path) -> None:
        """Remove the empty study of a driver that died while it created the sweep.

        Args:
            spec: The sweep's own spec file, which does not exist.

        Raises:
            LedgerError: The study has trials, or it belongs to another sweep.
        """

    def recorded_directory(self) -> str | None:
        """Return the `HOST:DIRECTORY` that a study in a database names; None for a file.

        Raises:
            LedgerError: The database cannot be read.
        """

    def delete(self) -> None:
        """Delete the study from a database; a file is removed with the sweep's directory.

        The caller holds the sweep's lock.

        Raises:
            LedgerError: The database cannot be used.
        """

    def holder(self) -> LockOwner | None:
        """Return the owner of the lock in the database; None for a free lock or a file.

        Raises:
            LedgerError: The database cannot be read.
        """


class StorageMoved(ValueError):
    """A resume would change where a sweep's ledger or its checkpoints are."""


def ledger_location(paths: SweepPaths, spec: SweepSpec) -> LedgerLocation:
    """Return the location of a sweep's ledger."""
    if spec.storage.ledger is None:
        return LedgerFile(paths.ledger)
    return LedgerDatabase(spec.storage.ledger, spec.name, paths.directory)


def as_location(location: LedgerLocation | Path) -> LedgerLocation:
    """Return a location unchanged, and a path as the SQLite file there."""
    return LedgerFile(location) if isinstance(location, Path) else location


def ledger_lock(location: LedgerLocation) -> SecondaryLock | None:
    """Return the lock that excludes drivers on all hosts that can write to the ledger.

    None for a file: the lock of the sweep's directory covers it.
    """
    return DatabaseLock(location) if isinstance(location, LedgerDatabase) else None


def holder_of(paths: SweepPaths, location: LedgerLocation) -> tuple[bool, LockOwner | None]:
    """Return whether a driver on any host holds the sweep's lock, and its owner where known.

    Raises:
        LedgerError: The database cannot be read.
    """
    if is_held(paths.lock):
        return True, read_holder(paths.lock)
    holder = location.holder()
    return holder is not None, holder


def check_kept(paths: SweepPaths, before: SweepSpec, after: SweepSpec) -> None:
    """Check that a resumed sweep keeps its name, its ledger and its checkpoint storage.

    Raises:
        StorageMoved: It would change one of them.
    """
    if before.name != paths.name:
        back = shlex.join(("mv", "-T", str(paths.directory), str(paths.root / before.name)))
        raise StorageMoved(
            f"{paths.directory} holds the sweep '{before.name}', copied or renamed: its runs in "
            "tracking, and what it keeps elsewhere, are found by that name, and two copies would "
            f"write into the same ones; rename it if it is the only one: {back}"
        )
    pairs = {
        "ledger": (before.storage.ledger, after.storage.ledger),
        "checkpoints": (before.storage.checkpoints, after.storage.checkpoints),
    }
    for key, (was, wanted) in pairs.items():
        if was != wanted:
            raise StorageMoved(
                f"storage.{key} is {was or 'null'} and cannot become {wanted or 'null'}: a "
                "sweep's trials stay where they were written down; leave it out, or run a new "
                "sweep, which can learn from this one (search.warm_start)"
            )
