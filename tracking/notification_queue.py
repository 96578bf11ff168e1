"""The queue of notifications: a table of the outbox, with the ids of all that were ever queued.

An id is queued once, whatever a resumed driver repeats. A delivered notification keeps its id and
loses its text. What must not live here: how a notification is delivered
(`tracking.notification_delivery`).
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tracking.outbox_file import FILE_NAME, OutboxError, open_file, outbox_error


class Waiting(NamedTuple):
    """A notification that is not delivered."""

    key: str
    """Its id: the same for each attempt, and for what a resumed driver repeats."""
    body: str
    """JSON."""


class Undelivered(NamedTuple):
    """How many notifications wait, and why."""

    waiting: int
    reason: str | None
    """Why the webhook did not take the last one that it was sent; None if it was sent none."""


class NotificationQueue:
    """The notifications in an outbox. Its methods may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._lock = threading.Lock()
        try:
            self._db = open_file(self._path)
        except sqlite3.Error as error:
            raise outbox_error(self._path, error, "notifications") from error

    def add(self, key: str, body: Mapping[str, Any]) -> None:
        """Queue a notification, unless one with this id was ever queued."""
        text = json.dumps(body, allow_nan=False)
        with self._using() as db:
            db.execute("INSERT OR IGNORE INTO notifications VALUES (?, 0, ?)", (key, text))

    def waiting(self) -> list[Waiting]:
        """Return the notifications that are not delivered, the oldest first."""
        query = "SELECT id, body FROM notifications WHERE NOT delivered ORDER BY rowid"
        with self._using() as db:
            rows = db.execute(query).fetchall()
        if not all(isinstance(text, str) for row in rows for text in row):
            raise OutboxError(f"the outbox {self._path} has a notification that is no text")
        return [Waiting(*row) for row in rows]

    def delivered(self, key: str) -> None:
        """Note that the receiver took a notification."""
        with self._using() as db:
            db.execute("UPDATE notifications SET delivered = 1, body = '' WHERE id = ?", (key,))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:
                raise outbox_error(self._path, error, "notifications") from error
