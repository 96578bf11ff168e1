"""The loop that takes an outbox to its server: now, later, and not for ever.

It opens the outbox itself, beside whoever fills it, so that it runs in a thread as it does in a
process of its own (`tracking.delivery_process`). No error leaves it: whatever goes wrong between
here and the server's disk, the records are safe in the outbox. What must not live here: how a
record becomes calls (see `tracking.delivery`), or who fills the outbox.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tracking.delivery import Delivery, NotStored, TrackingServer, in_brief, logger
from tracking.outbox import SWEEP, Outbox
from tracking.trackers import choose_tracker

_LINGER_SECONDS = 0.5
_HURRIED_SECONDS = 0.01
_HELD_SECONDS = 0.1
"""Between two looks while somebody waits and only artifacts that cannot be stored are left."""
_FIRST_DELAY_SECONDS = 0.5
_MAX_DELAY_SECONDS = 30.0
_LATE_SECONDS = 60.0
"""How long after its client gave up a create may reach the server and still be found."""
LAST_SECONDS = 0.05


class Destination(NamedTuple):
    """Which outbox is taken where; all of it is plain data.

    Attributes:
        uri: The address of a tracking store.
        artifact_root: Where a new experiment keeps artifacts; None leaves that to the server.
        experiment: The experiment's name.
        sweep_id: The sweep's identity, by which its runs are found again.
        outbox: Directory of the durable queue.
        name: The name of the sweep's run.
    """

    uri: str
    artifact_root: str | None
    experiment: str
    sweep_id: str
    outbox: str
    name: str

    def open_server(self) -> TrackingServer:
        """Connect to the tracking service, whose client may take seconds to import."""
        root = None if self.artifact_root is None else Path(self.artifact_root)
        return choose_tracker(self.uri, root).open_server(self.experiment, self.sweep_id)


class DeliveryProgress(NamedTuple):
    """How the draining goes.

    Attributes:
        ready: The server was reached and the sweep's run exists.
        is_down: The last attempt failed, be it only that of storing an artifact.
        heard: When a server that is down last did what it was asked, by the monotonic clock.
    """

    ready: bool
    is_down: bool
    heard: float

    @property
    def seconds_unresponsive(self) -> float:
        """For how many seconds the server has done nothing that it was asked; 0 while it does."""
        return time.monotonic() - self.heard if self.is_down else 0.0


NOT_YET = DeliveryProgress(ready=False, is_down=False, heard=0.0)


class DeliveryLoop:
    """Delivers until it is told to stop.

    Args:
        destination: From where, and to where.
        tell: Called with each change of the progress, in the thread that runs it.
        open_server: Builds the server; default the destination's own.
    """

    def __init__(
        self,
        destination: Destination,
        tell: Callable[[DeliveryProgress], None],
        open_server: Callable[[], TrackingServer] | None = None,
    ) -> None:
        self._destination = destination
        self._tell = tell
        self._open_server = open_server or destination.open_server
        self._closing = threading.Event()
        self._hurried = threading.Event()
        self._deadline = float("inf")
        self._heard = time.monotonic()
        self._is_down = self._is_held = self._is_ready = False
        self._told = NOT_YET

    # Called from other threads

    def flush_now(self, wanted: bool) -> None:
        """Somebody waits for the outbox to be empty, or no longer does."""
        if wanted or self._closing.is_set():
            self._hurried.set()
        else:
            self._hurried.clear()

    def close(self, deadline: float) -> None:
        """Stop once the outbox is empty, or at the deadline (monotonic) if that is sooner.

        A request under way cannot be cut off: it may take longer.
        """
        self._deadline = min(self._deadline, deadline)
        self._closing.set()
        self._hurried.set()

    # The loop

    def run(self) -> None:
        """Deliver until closed.

        Raises:
            OutboxError: The outbox cannot be opened.
        """
        outbox = Outbox(Path(self._destination.outbox), delivers=True)
        try:
            self._run(outbox)
        finally:
            outbox.close()

    def _run(self, outbox: Outbox) -> None:
        delay, waiting = _FIRST_DELAY_SECONDS, 0
        # An artifact that cannot be stored waits by itself.
        artifact_delay, not_stored = _FIRST_DELAY_SECONDS, float("-inf")
        num_unacked_creates, since = 0, 0.0
        delivery: Delivery | None = None
        while time.monotonic() < self._deadline:
            try:
                waiting = outbox.pending
                if self._closing.is_set() and not waiting:
                    break
                if not outbox.try_lock():  # another process delivers, or has not quite ended
                    self._pause(_FIRST_DELAY_SECONDS)
                    continue
                if delivery is None:
                    delivery = Delivery(
                        outbox,
                        self._open_server(),
                        sweep_id=self._destination.sweep_id,
                        name=self._destination.name,
                    )
                delivery.connect()
                wait = _FIRST_DELAY_SECONDS if self._hurried.is_set() else artifact_delay
                uploads = time.monotonic() >= not_stored + wait
                delivery.drain(self._is_late, uploads=uploads)
                if num_unacked_creates and time.monotonic() >= since + _LATE_SECONDS:
                    delivery.search_again()
                    outbox.creates_settled()
                ready = outbox.run_id(SWEEP) is not None
                still = outbox.num_unacked_creates
            except NotStored as error:
                logger.log(logging.DEBUG if self._is_held else logging.WARNING, "%s", error)
                self._is_held, not_stored = True, time.monotonic()
                artifact_delay = min(2 * artifact_delay, _MAX_DELAY_SECONDS)
                continue
            except Exception as error:
                # The records are safe and the sweep goes on: the only right thing is to try again
                # later.
                if delivery is not None:
                    delivery.disconnect()
                logger.log(
                    logging.DEBUG if self._is_down else logging.WARNING,
                    "%d records wait, the tracking server does not answer (%s)",
                    waiting,
                    in_brief(error),
                )
                self._note(is_down=True)
                self._pause(delay)
                delay = min(2 * delay, _MAX_DELAY_SECONDS)
                continue
            if self._is_down:
                logger.info("the tracking server answers again")
            if self._is_held and uploads and time.monotonic() < self._deadline:
                logger.info("artifacts are stored again")
                self._is_held, artifact_delay = False, _FIRST_DELAY_SECONDS
            delay = _FIRST_DELAY_SECONDS
            self._note(is_down=False, ready=ready)
            if still != num_unacked_creates:
                num_unacked_creates, since = still, time.monotonic()
            # Let more come together, unless somebody waits: a request costs more than a point.
            if self._hurried.wait(_LINGER_SECONDS):
                time.sleep(_HURRIED_SECONDS if uploads else _HELD_SECONDS)
        # Whatever goes wrong here, the next process looks again.
        with contextlib.suppress(Exception):
            late = time.monotonic() >= self._deadline
            if delivery is not None and not late and outbox.num_unacked_creates:
                delivery.search_again()

    def _is_late(self) -> bool:
        """Asked between two batches."""
        self._heard = time.monotonic()
        if self._is_down or self._is_held:
            self._note(is_down=self._is_down)
        return self._heard >= self._deadline

    def _pause(self, seconds: float) -> None:
        """Wait, but while somebody waits for the delivery no longer than makes sense."""
        if self._hurried.wait(seconds):
            time.sleep(max(min(_FIRST_DELAY_SECONDS, self._deadline - time.monotonic()), 0.0))

    def _note(self, *, is_down: bool, ready: bool = False) -> None:
        self._is_down = is_down
        self._is_ready = self._is_ready or ready
        waits = is_down or self._is_held
        progress = DeliveryProgress(self._is_ready, waits, self._heard if waits else 0.0)
        if progress != self._told:
            self._told = progress
            self._tell(progress)


class DeliveryThread:
    """A drain in this process.

    Args:
        destination: From where, and to where.
        open_server: Builds the server; default the destination's own.
    """

    def __init__(
        self, destination: Destination, open_server: Callable[[], TrackingServer] | None = None
    ) -> None:
        self.ready = threading.Event()
        self.progress = NOT_YET
        self._drain = DeliveryLoop(destination, self._note, open_server)
        self._thread = threading.Thread(
            target=self._drain.run, name="tracking-outbox", daemon=True
        )
        self._thread.start()

    def flush_now(self, wanted: bool) -> None:
        """Somebody waits for the outbox to be empty, or no longer does."""
        self._drain.flush_now(wanted)

    def close(self, deadline: float) -> None:
        """Wait until the outbox is empty, at the latest until the deadline (monotonic)."""
        self._drain.close(deadline)
        # A request under way cannot be cut off; its thread ends when the answer is there.
        self._thread.join(max(deadline - time.monotonic(), 0.0) + LAST_SECONDS)

    @property
    def is_alive(self) -> bool:
        """Whether it delivers still."""
        return self._thread.is_alive()

    def _note(self, progress: DeliveryProgress) -> None:
        self.progress = progress
        if progress.ready:
            self.ready.set()
