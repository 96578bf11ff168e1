"""The loop that delivers an outbox: it retries after errors, and stops at a deadline.

The loop opens the outbox itself, so that it can run in a thread or in a process of its own
(`tracking.delivery_process`). It catches every error of the server: the records are safe in the
outbox. What must not live here: how a record becomes calls (see `tracking.delivery`), or who
fills the outbox.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tracking.delivery import Delivery, NotStored, TrackingServer, error_line
from tracking.limits import clean_text
from tracking.outbox import Outbox, logger
from tracking.trackers import choose_tracker

_LINGER_SECONDS = 0.5
_HURRIED_SECONDS = 0.01
_BLOCKED_SECONDS = 0.1
"""Pause between two attempts of a flush while all remaining records are blocked artifacts."""
_FIRST_DELAY_SECONDS = 0.5
_MAX_DELAY_SECONDS = 30.0
_LATE_SECONDS = 60.0
"""A request to create a run may reach the server this long after its client gave up."""
LAST_SECONDS = 0.05


class Destination(NamedTuple):
    """Which outbox is delivered to which server, as plain data.

    Attributes:
        uri: The URI of a tracking store.
        artifact_root: The artifact location of a new experiment; None: the server chooses it.
        sweep_id: The sweep's identity, a tag by which its runs are found again.
    """

    uri: str
    artifact_root: str | None
    experiment: str
    sweep_id: str
    outbox: str

    def open_server(self) -> TrackingServer:
        """Connect to the tracking service, whose client may take seconds to import."""
        root = None if self.artifact_root is None else Path(self.artifact_root)
        return choose_tracker(self.uri, root).open_server(self.experiment, self.sweep_id)


class DeliveryLoop:
    """Delivers an outbox until `close` is called.

    `on_outage` receives when the server last answered, by the monotonic clock, after an attempt
    that failed or an artifact that could not be stored; None once the server answers again.
    """

    def __init__(
        self,
        destination: Destination,
        on_outage: Callable[[float | None], None],
        open_server: Callable[[], TrackingServer] | None = None,
    ) -> None:
        self._destination = destination
        self._on_outage = on_outage
        self._open_server = open_server or destination.open_server
        self._closing = threading.Event()
        self._hurried = threading.Event()
        self._deadline = float("inf")
        self._last_answer = time.monotonic()
        self._is_down = self._is_blocked = False
        self._reported: float | None = None

    # Called from other threads

    def flush_now(self, wanted: bool) -> None:
        """Deliver without pauses while a caller waits for an empty outbox; False: pause again."""
        if wanted or self._closing.is_set():
            self._hurried.set()
        else:
            self._hurried.clear()

    def close(self, deadline: float) -> None:
        """Stop when the outbox is empty, at the latest at the deadline (monotonic).

        A running request cannot be interrupted and may take longer.
        """
        self._deadline = min(self._deadline, deadline)
        self._closing.set()
        self._hurried.set()

    # The loop

    def run(self) -> None:
        """Deliver until closed."""
        outbox = Outbox(Path(self._destination.outbox), delivers=True)
        try:
            self._run(outbox)
        finally:
            outbox.close()

    def _run(self, outbox: Outbox) -> None:
        delay, waiting = _FIRST_DELAY_SECONDS, 0
        # Artifacts that cannot be stored have a back-off of their own.
        artifact_delay, not_stored = _FIRST_DELAY_SECONDS, float("-inf")
        num_unacked_creates, since = 0, 0.0
        delivery: Delivery | None = None
        while time.monotonic() < self._deadline:
            try:
                waiting = outbox.pending
                if self._closing.is_set() and not waiting:
                    break
                if not outbox.try_lock():  # another process delivers, or has not exited yet
                    self._pause(_FIRST_DELAY_SECONDS)
                    continue
                if delivery is None:
                    delivery = Delivery(
                        outbox,
                        self._open_server(),
                        sweep_id=self._destination.sweep_id,
                        name=clean_text(self._destination.experiment),
                    )
                delivery.connect()
                wait = _FIRST_DELAY_SECONDS if self._hurried.is_set() else artifact_delay
                uploads = time.monotonic() >= not_stored + wait
                delivery.drain(self._is_late, uploads=uploads)
                if num_unacked_creates and time.monotonic() >= since + _LATE_SECONDS:
                    delivery.search_again()
                    outbox.creates_settled()
                still = outbox.num_unacked_creates
            except NotStored as error:
                logger.log(logging.DEBUG if self._is_blocked else logging.WARNING, "%s", error)
                self._is_blocked, not_stored = True, time.monotonic()
                artifact_delay = min(2 * artifact_delay, _MAX_DELAY_SECONDS)
                continue
            except Exception as error:
                # Any exception of the server: the records are safe in the outbox, so the loop
                # tries again later.
                if delivery is not None:
                    delivery.disconnect()
                logger.log(
                    logging.DEBUG if self._is_down else logging.WARNING,
                    "%d records wait, the tracking server does not answer (%s)",
                    waiting,
                    error_line(error),
                )
                self._report(is_down=True)
                self._pause(delay)
                delay = min(2 * delay, _MAX_DELAY_SECONDS)
                continue
            if self._is_down:
                logger.info("the tracking server answers again")
            if self._is_blocked and uploads and time.monotonic() < self._deadline:
                logger.info("artifacts are stored again")
                self._is_blocked, artifact_delay = False, _FIRST_DELAY_SECONDS
            delay = _FIRST_DELAY_SECONDS
            self._report(is_down=False)
            if still != num_unacked_creates:
                num_unacked_creates, since = still, time.monotonic()
            # Unless a caller waits, wait for more records: a request costs more than a point.
            if self._hurried.wait(_LINGER_SECONDS):
                time.sleep(_HURRIED_SECONDS if uploads else _BLOCKED_SECONDS)
        # Errors do not matter here: the next process searches again.
        with contextlib.suppress(Exception):
            late = time.monotonic() >= self._deadline
            if delivery is not None and not late and outbox.num_unacked_creates:
                delivery.search_again()

    def _is_late(self) -> bool:
        """Note that the server answered; returns whether the deadline is over."""
        self._last_answer = time.monotonic()
        if self._is_down or self._is_blocked:
            self._report(is_down=self._is_down)
        return self._last_answer >= self._deadline

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt, for a shorter time while a caller waits."""
        if self._hurried.wait(seconds):
            time.sleep(max(min(_FIRST_DELAY_SECONDS, self._deadline - time.monotonic()), 0.0))

    def _report(self, *, is_down: bool) -> None:
        self._is_down = is_down
        last_answer = self._last_answer if is_down or self._is_blocked else None
        if last_answer != self._reported:
            self._reported = last_answer
            self._on_outage(last_answer)


class DeliveryThread:
    """Runs the delivery loop in a thread of this process."""

    def __init__(
        self, destination: Destination, open_server: Callable[[], TrackingServer] | None = None
    ) -> None:
        self.last_answer: float | None = None
        self._loop = DeliveryLoop(destination, self._on_outage, open_server)
        self._thread = threading.Thread(target=self._loop.run, name="tracking-outbox", daemon=True)
        self._thread.start()

    def flush_now(self, wanted: bool) -> None:
        """Deliver without pauses while a caller waits for an empty outbox; False: pause again."""
        self._loop.flush_now(wanted)

    def close(self, deadline: float) -> None:
        """Wait until the outbox is empty, at the latest until the deadline (monotonic)."""
        self._loop.close(deadline)
        # A running request cannot be interrupted; the thread ends when the answer arrives.
        self._thread.join(max(deadline - time.monotonic(), 0.0) + LAST_SECONDS)

    @property
    def is_alive(self) -> bool:
        """Whether the loop still runs."""
        return self._thread.is_alive()

    def _on_outage(self, last_answer: float | None) -> None:
        self.last_answer = last_answer
