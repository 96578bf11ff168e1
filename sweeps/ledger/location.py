"""Where a sweep's ledger is: in a file of its own, or in a PostgreSQL database with those of other
sweeps; and what either of them can do.

This is the one module that tells them apart by the spec; whoever writes does so through the
storage of the place (`ledger.storage`). What must not live here: files (`ledger.file`), databases
(`ledger.database`), and Optuna.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from sweeps.config.spec import SweepSpec
from sweeps.ledger.dialect import Dialect, Rows
from sweeps.ledger.postgres import LedgerDatabase
from sweeps.ledger.sqlite import LedgerFile
from sweeps.paths import LedgerError, SweepPaths
from sweeps.sweep_lock import LockOwner, SecondaryLock, is_held, read_holder


class LedgerLocation(Protocol):
    """A ledger's place. As text it is what messages call it."""

    @property
    def study(self) -> str:
        """The name of its Optuna study."""

    @property
    def sql(self) -> Dialect:
        """How its database wants to be asked."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What its driver raises."""

    @property
    def notes(self) -> Mapping[str, str]:
        """What a study there says of itself from its beginning."""

    def reading(self) -> AbstractContextManager[Rows]:
        """Open it for one read transaction: what it sees belongs together.

        Raises:
            LedgerError: There is none, or it cannot be used.
        """

    def num_trials(self) -> int | None:
        """Count its trials without changing anything; None when it holds no study.

        Raises:
            LedgerError: There is none, or it cannot be used.
        """

    def refusal(self, error: Exception) -> LedgerError:
        """Return what an error of the storage below means: busy, not usable, or damaged."""

    def damaged(self, reason: str) -> LedgerError:
        """Return the error about a ledger that cannot be read."""

    def check_available(self) -> None:
        """Make sure that a sweep may be begun here; nothing is changed.

        Raises:
            LedgerError: It cannot be used, or holds a sweep of that name.
            SweepHeld: A driver runs one of that name, on whatever host.
        """

    def remove_incomplete(self, spec: Path) -> None:
        """Remove what a driver left that died before the sweep existed; never a ledger of trials.

        Args:
            spec: The sweep's own spec file, which is not there.

        Raises:
            LedgerError: There are trials, or it is not this sweep's.
        """

    def lock(self) -> SecondaryLock | None:
        """A lock that holds wherever the ledger can be written to; None: the directory's does."""

    def holder(self) -> LockOwner | None:
        """Who holds that lock, None when nobody does or there is none.

        Raises:
            LedgerError: It cannot be asked.
        """


class StorageMoved(ValueError):
    """A sweep was to go on with its ledger or its checkpoints elsewhere."""


def ledger_location(paths: SweepPaths, spec: SweepSpec) -> LedgerLocation:
    """Return the place of a sweep's ledger."""
    if spec.storage.ledger is None:
        return LedgerFile(paths.ledger)
    return LedgerDatabase(spec.storage.ledger, spec.name, paths.directory)


def as_place(place: LedgerLocation | Path) -> LedgerLocation:
    """Return a place; a path stands for the file there."""
    return LedgerFile(place) if isinstance(place, Path) else place


def holder_of(paths: SweepPaths, place: LedgerLocation) -> tuple[bool, LockOwner | None]:
    """Return whether a driver holds a sweep, here or on another host, and who it is if it is
    known.

    Raises:
        LedgerError: The place cannot be asked.
    """
    if is_held(paths.lock):
        return True, read_holder(paths.lock)
    holder = place.holder()
    return holder is not None, holder


def check_kept(paths: SweepPaths, before: SweepSpec, after: SweepSpec) -> None:
    """Make sure that a sweep goes on where its trials are written down, and what they saved lies.

    Raises:
        StorageMoved: It would not.
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
