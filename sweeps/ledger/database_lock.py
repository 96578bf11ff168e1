"""One driver per sweep wherever its ledger's database can be reached from, beside the lock of its
directory.

Two things together. A session's advisory lock says that a driver lives: the server drops it with
the connection, so a dead driver's needs no time-out, and one whose host is gone is noticed by the
keepalives of the connection. A number says whose turn it is to write: each driver that takes the
lock takes the next one, and each transaction of a ledger begins by looking at it in its row
(`ledger.storage`). A driver that lost its connection takes the lock again if nobody has had it
meanwhile; otherwise it is over. What must not live here: the directory's lock (`lock`).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from sweeps.ledger.dialect import one
from sweeps.ledger.postgres import LedgerDatabase, Rows
from sweeps.sweep_lock import LockOwner, SweepLockedError

_LOOK_EVERY = 0.25
"""Seconds for which an answer holds. The ledger's own transactions ask each time."""
_TABLE = """
CREATE TABLE IF NOT EXISTS gradsweep_drivers (
    sweep text PRIMARY KEY,
    turn bigint NOT NULL,
    written bigint NOT NULL,
    session integer NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    started double precision NOT NULL
)
"""
_TAKE = """
INSERT INTO gradsweep_drivers VALUES (:sweep, 1, 0, pg_backend_pid(), :host, :pid, :started)
ON CONFLICT (sweep) DO UPDATE SET turn = gradsweep_drivers.turn + 1, written = 0,
session = excluded.session, host = excluded.host, pid = excluded.pid, started = excluded.started
RETURNING turn
"""
_TAKE_AGAIN = """
UPDATE gradsweep_drivers SET session = pg_backend_pid() WHERE sweep = :sweep AND turn = :turn
RETURNING turn
"""
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended(:sweep, 0))"
_UNLOCK = "SELECT pg_advisory_unlock(hashtextextended(:sweep, 0))"
_TURN = "SELECT turn FROM gradsweep_drivers WHERE sweep = :sweep"


class DatabaseLock:
    """The lock of one sweep's ledger, held until `release` or the end of the connection.

    Args:
        location: The ledger's; it is told whose turn it is.
    """

    def __init__(self, location: LedgerDatabase) -> None:
        self._location = location
        self._connection: Any = None
        self._asked = 0.0

    def acquire(self, holder: LockOwner) -> None:
        """Take the lock.

        Args:
            holder: Who takes it.

        Raises:
            SweepHeld: Another driver holds it.
            LedgerError: The database cannot be used.
        """
        with self._location.schema_lock() as rows:
            rows.execute(_TABLE)
        with self._location.translate_errors():
            self._connect()
            if not self._ask(_LOCK):
                self._connection.close()
                raise SweepLockedError(self._location.directory, self._who_holds())
            self._location.fencing_token = self._ask(
                _TAKE, host=holder.host, pid=holder.pid, started=holder.started
            )
            self._location.commit_count = 0

    def check(self) -> None:
        """Make sure that it is still this driver's turn; one question, at most every quarter of a
        second.

        Raises:
            LockLost: It is not; nothing may be written to the sweep any more.
            LedgerError: The database does not answer.
        """
        # A clock that goes on while the process, or the machine, stands still.
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if now - self._asked < _LOOK_EVERY:
            return
        with self._location.translate_errors():
            mine = self._location.retry_transient(self._is_mine, before_again=self._disconnect)
        if not mine:
            raise self._location.lost()
        self._asked = now

    def release(self) -> None:
        """Give the lock up now, not when the server notices that the connection has ended."""
        if self._connection is not None:
            with contextlib.suppress(*self._location.errors):  # it is broken already
                self._ask(_UNLOCK)
        self._disconnect()

    def _is_mine(self) -> bool:
        if self._connection is not None:
            return bool(self._ask(_TURN) == self._location.fencing_token)
        # The connection was lost, and the lock with it.
        self._connect()
        try:
            if self._ask(_LOCK):
                return self._ask(_TAKE_AGAIN, turn=self._location.fencing_token) is not None
            if self._ask(_TURN) != self._location.fencing_token:
                return False
            from psycopg2 import OperationalError

            raise OperationalError("an earlier connection of this driver still holds the lock")
        except BaseException:  # no connection stays without the lock; raised again
            self._disconnect()
            raise

    def _connect(self) -> None:
        self._connection = self._location.connect()
        self._connection.autocommit = True

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(*self._location.errors):  # it is broken already
                self._connection.close()
            self._connection = None

    def _ask(self, sql: str, **parameters: Any) -> Any:
        asked = {"sweep": self._location.study, **parameters}
        return one(Rows(self._connection).execute(sql, asked))

    def _who_holds(self) -> LockOwner | None:
        """The holder, who between locking and saying who it is may take a moment."""
        for _ in range(20):
            if (holder := self._location.holder()) is not None:
                return holder
            time.sleep(0.05)
        return None
