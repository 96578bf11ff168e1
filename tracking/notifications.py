"""Notifications of a sweep: their queue, a table of the outbox, and a thread that posts them.

An id is queued once, whatever a resumed driver repeats. A notification leaves the queue when the
webhook has answered with a status from 200 to 299, and keeps its id. After a kill, the next driver
posts it again with the same id. The webhook's address is a secret: who knows it can post. No
message and no exception here contains any part of it. What must not live here: what a notification
says.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
import sqlite3
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tracking.address import is_local
from tracking.outbox import logger
from tracking.outbox_file import FILE_NAME, OutboxError, open_file, outbox_error

SECONDS = 10.0
"""How long one step of a request may take: to connect, to send, to receive."""
_MOST_SECONDS = 300.0
_VISIBLE = re.compile(r"[!-~]+")
_TEMPORARY = {408, 425, 429}
"""Answers below 500 that another attempt may change."""


class NotTaken(Exception):
    """The webhook did not take a notification; the message says why."""

    def __init__(self, reason: str, *, is_final: bool = False, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.seconds = seconds


def address_fault(address: str) -> str | None:
    """Return what is wrong with a webhook's address; None if nothing is."""
    try:
        parts = urlsplit(address)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not (has_host and _VISIBLE.fullmatch(address)):
        return "is not an address"
    if parts.scheme not in ("http", "https"):
        return "does not start with https://"
    if "@" in parts.netloc:
        return "has a user name or password before its host"
    if parts.scheme == "http" and not _is_on_this_machine(address):
        return "is an http:// address on another machine, which would receive it unencrypted"
    return None


def post(address: str, body: bytes, *, key: str, timeout: float = SECONDS) -> None:
    """Post JSON to a webhook once.

    The certificate of an https server is checked. A redirect is not followed, because it could
    lead the notification elsewhere. Proxies of the environment are used, but not to this machine.
    """
    opener = urllib.request.OpenerDirector()  # of these handlers, none follows a redirect
    opener.add_handler(urllib.request.ProxyHandler({} if _is_on_this_machine(address) else None))
    opener.add_handler(urllib.request.HTTPHandler())
    opener.add_handler(urllib.request.HTTPSHandler(context=ssl.create_default_context()))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "gradsweep",
        "Idempotency-Key": key,
    }
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")
    try:
        with opener.open(request, timeout=timeout) as response:
            status, wait = response.status, response.headers.get("Retry-After", "")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotTaken(_describe(error)) from None  # the error's text may have the address
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise NotTaken(
            f"it redirects (status {status}), and no redirect is followed", is_final=True
        )
    seconds = min(float(wait), _MOST_SECONDS) if re.fullmatch(r"\d{1,6}", wait) else 0.0
    is_final = status < 500 and status not in _TEMPORARY
    raise NotTaken(f"it answers with status {status}", is_final=is_final, seconds=seconds)


def _is_on_this_machine(address: str) -> bool:
    parts = urlsplit(address)
    return is_local(f"{parts.scheme}://{parts.netloc}")


def _describe(error: Exception) -> str:
    """Return why a request failed, without a text that may have part of the address."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    match cause:
        case ssl.SSLCertVerificationError():
            return "its certificate is not valid"
        case ssl.SSLError():
            return "no encrypted connection can be made"
        case TimeoutError():
            return "it does not answer in time"
        case socket.gaierror():
            return "its host is not found"
        case ConnectionRefusedError():
            return "it refuses connections"
        case OSError():
            return "the connection failed"
    return "it gives no valid answer"


_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 300.0
_MAX_FAILURES = 20
"""After so many failed attempts in a row, only a new notification starts another one."""
_LAST_FAILURES = 2
"""After so many failed attempts in a row, a caller of `close` waits no longer."""


class NotificationDelivery:
    """Posts waiting notifications in a thread until it is closed."""

    def __init__(
        self,
        queue: NotificationQueue,
        address: str | None,
        send: Callable[..., None] = post,
    ) -> None:
        self._queue, self._address, self._send = queue, address, send
        self._changed = threading.Condition()  # guards the attributes below
        self._has_news = True  # what an earlier driver left
        self._deadline: float | None = None
        """When `close` returns, by the monotonic clock; None before it is called."""
        self._reason: str | None = None
        self._refused: set[str] = set()
        """Notifications that this process does not post again."""
        self._thread: threading.Thread | None = None
        if address is not None:
            self._thread = threading.Thread(
                target=self._run, args=[address], name="notifications", daemon=True
            )
            self._thread.start()

    def add(self, key: str, body: Mapping[str, Any]) -> None:
        """Queue a notification, unless one with this id was ever queued, and deliver it."""
        self._queue.add(key, body)
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def close(self, timeout: float) -> Undelivered:
        """Deliver for at most `timeout` seconds, then stop. A second call does nothing."""
        with self._changed:
            if self._deadline is not None:
                return Undelivered(0, None)
            self._deadline = time.monotonic() + timeout
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        left = len(self._queue.waiting())
        self._queue.close()
        return Undelivered(left, self._reason)

    def _run(self, address: str) -> None:
        failures, is_last = 0, False
        delay: float | None = None
        while True:
            closing = self._wait(delay, is_last=is_last)
            if closing and not is_last:
                failures, is_last = 0, True
            if self._seconds_left() <= 0:
                return
            try:
                self._deliver(address)
            except (NotTaken, OutboxError) as error:
                self._reason = str(error)
                failures += 1
                if failures == 1 and self._deadline is None:
                    logger.warning("the webhook takes no notifications: %s", error)
                delay = _delay(failures, error)
                if is_last and failures >= _LAST_FAILURES:
                    return
            else:
                if not is_last and failures:
                    logger.info("the webhook takes notifications again")
                failures, delay = 0, None
                if is_last:
                    return

    def _deliver(self, address: str) -> None:
        """Post all waiting notifications, the oldest first."""
        for one in self._queue.waiting():
            if one.key in self._refused:
                continue
            timeout = min(SECONDS, self._seconds_left())
            if timeout <= 0:
                return
            try:
                self._send(address, one.body.encode(), key=one.key, timeout=timeout)
            except NotTaken as error:
                if not error.is_final:
                    raise
                logger.warning("the webhook refuses a notification: %s", error)
                self._reason = str(error)
                self._refused.add(one.key)
            else:
                self._queue.delivered(one.key)

    def _wait(self, delay: float | None, *, is_last: bool) -> bool:
        """Wait until the next attempt; returns whether `close` was called."""
        with self._changed:
            if delay is None:
                self._changed.wait_for(lambda: self._has_news or self._deadline is not None)
            else:
                self._changed.wait_for(
                    lambda: not is_last and self._deadline is not None,
                    min(delay, self._seconds_left(), threading.TIMEOUT_MAX),
                )
            self._has_news = False
            return self._deadline is not None

    def _seconds_left(self) -> float:
        return math.inf if self._deadline is None else self._deadline - time.monotonic()


def _delay(failures: int, error: NotTaken | OutboxError) -> float | None:
    """Return for how many seconds to wait after some failures in a row; None: for news."""
    if failures >= _MAX_FAILURES:
        return None
    asked = error.seconds if isinstance(error, NotTaken) else 0.0
    return max(min(_FIRST_DELAY_SECONDS * 2.0 ** (failures - 1), _MAX_DELAY_SECONDS), asked)


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
