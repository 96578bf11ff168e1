"""The location of a ledger in a test's PostgreSQL."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sweeps.ledger.location import ledger_lock
from sweeps.ledger.postgres import LedgerDatabase
from sweeps.sweep_lock import LockOwner
from tests.chaos.postgres import Cluster


@contextmanager
def held_place(
    cluster: Cluster, directory: Path, name: str | None = None
) -> Iterator[LedgerDatabase]:
    """A place for a new sweep, whose lock is held."""
    place = LedgerDatabase(cluster.uri, name or f"s-{uuid.uuid4().hex[:8]}", directory)
    lock = ledger_lock(place)
    lock.acquire(holder())
    yield place
    lock.release()


def holder() -> LockOwner:
    """This process, as it would hold a sweep."""
    return LockOwner(socket.gethostname(), os.getpid(), time.time(), uuid.uuid4().hex)
