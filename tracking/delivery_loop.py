"""The loop that delivers an outbox: it retries after errors, and stops at a deadline.

    python -m tracking.delivery_loop

runs it in a child process of the driver. It reads its destination as a line of JSON, then one line
for each call. In the driver, each request would hold the interpreter lock while trials' results
wait, and mlflow would stay in memory. The child exits at the end of its standard input, so it
never outlives the driver. It may be killed at any time: the outbox knows which records were in
flight. The loop catches every error of the server: the records are safe. What must not live here:
how a record becomes calls (see `tracking.delivery`), or who fills the outbox.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from tracking.child_process import lower_priority, raise_priority, start_python
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
_LAST_SECONDS = 0.05
_PATIENCE_SECONDS = (0.5, 30.0)


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
        self._thread.join(max(deadline - time.monotonic(), 0.0) + _LAST_SECONDS)

    @property
    def is_alive(self) -> bool:
        """Whether the loop still runs."""
        return self._thread.is_alive()

    def _on_outage(self, last_answer: float | None) -> None:
        self.last_answer = last_answer


class DeliveryProcess:
    """Runs the delivery loop in a child process, and starts another one if the child dies."""

    def __init__(self, destination: Destination, environment: Mapping[str, str]) -> None:
        self.last_answer: float | None = None
        self._destination = destination
        self._environment = environment
        self._closing = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(
            target=self._read_messages,
            name="tracking-outbox",
            daemon=True,
        )
        self._thread.start()

    def flush_now(self, wanted: bool) -> None:
        """Deliver without pauses while a caller waits for an empty outbox; False: pause again.

        The child is no idle process from then on: callers wait when no trial runs any more.
        """
        if wanted:
            raise_priority(self._process)
        _write(self._process.stdin, ["flush_now", wanted])

    def close(self, deadline: float) -> None:
        """Wait until the outbox is empty, at the latest until the deadline (monotonic)."""
        self._closing.set()
        _write(self._process.stdin, ["close", deadline])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline - time.monotonic(), 0.0) + _LAST_SECONDS)
        self._process.kill()  # the outcome of a running request counts as unknown
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the child runs, or will be started again."""
        return self._thread.is_alive()

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = start_python(
            *("-m", "tracking.delivery_loop"),
            environment=self._environment,
            stdin=pipe,
            stdout=pipe,
        )
        lower_priority(process)
        _write(process.stdin, self._destination)
        return process

    def _read_messages(self) -> None:
        delay, longest = _PATIENCE_SECONDS
        while True:
            # Closing the pipe raises this if the child never read the last line.
            with contextlib.suppress(BrokenPipeError), self._process as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.endswith("\n"):  # else the child was killed while it wrote
                        self._handle_message(*json.loads(line))
            if self._closing.is_set():
                return
            logger.warning(
                "the process that delivers to the tracking server ended (exit code %d); another "
                "one is started, and nothing is lost",
                process.returncode,
            )
            while not self._closing.wait(delay):
                delay = min(2 * delay, longest)
                try:
                    self._process = self._start()
                except OSError as error:  # the system may be out of memory or processes
                    logger.warning("no process that delivers can be started: %s", error)
                else:
                    break
            else:
                return
            if self._closing.is_set():  # `close` may have sent its line to the previous child
                self._process.kill()

    def _handle_message(self, kind: str, payload: Any) -> None:
        if kind == "log":
            logger.log(*payload)
        else:
            self.last_answer = payload


def _write(pipe: IO[str] | None, payload: object) -> None:
    """Write a line to a process that may have ended."""
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # the other end, or ours, is closed
        pipe.write(json.dumps(payload) + "\n")
        pipe.flush()


class _StatusWriter(logging.Handler):
    """Sends log records to the parent process."""

    def __init__(self, pipe: IO[str]) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        _write(self._pipe, ["log", [record.levelno, "%s", record.getMessage()]])


def _read_commands(loop: DeliveryLoop) -> None:
    for line in sys.stdin:
        method, argument = json.loads(line)
        if method == "flush_now":
            loop.flush_now(argument)
        else:
            loop.close(argument)
    os._exit(1)  # the driver died without calling `close`


def main() -> None:
    """Deliver for the process at the other end of standard input and output."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # the whole job gets them; the driver acts
        signal.signal(signum, signal.SIG_IGN)
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that a library's prints do not go into the pipe
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_StatusWriter(pipe))
    destination = Destination(*json.loads(sys.stdin.readline()))

    def on_outage(last_answer: float | None) -> None:
        _write(pipe, ["outage", last_answer])

    def open_server() -> TrackingServer:
        # Collections would take a quarter of the time of importing mlflow. Later, each full one
        # would scan all its objects: a fifth of the time.
        gc.disable()
        try:
            return destination.open_server()
        finally:
            gc.freeze()
            gc.enable()

    loop = DeliveryLoop(destination, on_outage, open_server)
    threading.Thread(target=_read_commands, args=[loop], daemon=True).start()
    loop.run()
    os._exit(0)  # a normal exit would wait for the thread that reads standard input


if __name__ == "__main__":
    main()
