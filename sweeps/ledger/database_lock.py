"""Lock a sweep for one driver on all hosts that reach its ledger's database.

The lock has two parts. The first is a session's advisory lock, which shows that a driver is alive:
the server releases it when the connection ends. So a dead driver's lock needs no time-out, and
keepalives detect a lost host. The second is a fencing token (`turn`), which states which driver
may write. Each driver that acquires the lock takes the next token, and each transaction of a
ledger first checks the token (`ledger.storage`). A driver that lost its connection acquires the
lock again if no other driver has held it since; otherwise it must exit. What must not live here:
the directory's lock (`sweep_lock`).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from sweeps.ledger.dialect import one
from sweeps.ledger.postgres import LedgerDatabase, PostgresConnection
from sweeps.sweep_lock import LockOwner, sweep_locked

_CHECK_EVERY = 0.25
"""Seconds for which a check stays valid. Each transaction of the ledger checks the token anew."""
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
        location: The ledger's location; `acquire` sets its fencing token.
    """

    def __init__(self, location: LedgerDatabase) -> None:
        self._location = location
        self._connection: Any = None
        self._checked = 0.0

    def acquire(self, holder: LockOwner) -> None:
        """Acquire the lock and the next fencing token.

        Args:
            holder: The new owner.

        Raises:
            SweepLockedError: Another driver holds it.
            LedgerError: The database cannot be used.
        """
        with self._location.schema_lock() as db:
            db.execute(_TABLE)
        with self._location.translate_errors():
            self._connect()
            if not self._query(_LOCK):
                self._connection.close()
                raise sweep_locked(self._location.directory, self._read_owner())
            self._location.fencing_token = self._query(
                _TAKE, host=holder.host, pid=holder.pid, started=holder.started
            )
            self._location.commit_count = 0

    def check(self) -> None:
        """Check that this driver still owns the lock; at most one query in 0.25 seconds.

        Raises:
            LockLost: Another driver owns it; this driver must not write to the sweep any more.
            LedgerError: The database does not answer.
        """
        # This clock also advances while the process, or the machine, is suspended.
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if now - self._checked < _CHECK_EVERY:
            return
        with self._location.translate_errors():
            mine = self._location.retry_transient(self._is_mine, before_again=self._disconnect)
        if not mine:
            raise self._location.lost()
        self._checked = now

    def release(self) -> None:
        """Release the lock now, not when the server detects the end of the connection."""
        if self._connection is not None:
            with contextlib.suppress(*self._location.errors):  # it is broken already
                self._query(_UNLOCK)
        self._disconnect()

    def _is_mine(self) -> bool:
        if self._connection is not None:
            return bool(self._query(_TURN) == self._location.fencing_token)
        # The server dropped the lock with the connection.
        self._connect()
        try:
            if self._query(_LOCK):
                return self._query(_TAKE_AGAIN, turn=self._location.fencing_token) is not None
            if self._query(_TURN) != self._location.fencing_token:
                return False
            from psycopg2 import OperationalError

            raise OperationalError("an earlier connection of this driver still holds the lock")
        except BaseException:  # keep no connection without the lock
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

    def _query(self, sql: str, **parameters: Any) -> Any:
        values = {"sweep": self._location.study, **parameters}
        return one(PostgresConnection(self._connection).execute(sql, values))

    def _read_owner(self) -> LockOwner | None:
        """Return the owner; waits, because a driver writes its row just after it has the lock."""
        for _ in range(20):
            if (holder := self._location.holder()) is not None:
                return holder
            time.sleep(0.05)
        return None
