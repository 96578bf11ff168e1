"""Run the delivery loop in a child process of the driver, connected by pipes.

    python -m tracking.delivery_process

reads its destination as a line of JSON, then one line for each call. In the driver, each request
would hold the interpreter lock while trials' results wait, and mlflow would stay in memory. The
child exits at the end of its standard input, so it never outlives the driver. It may be killed at
any time: the outbox knows which records were in flight. What must not live here: what the loop
does (`tracking.delivery_loop`).
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
from collections.abc import Mapping
from typing import IO, Any

from tracking.delivery import TrackingServer
from tracking.delivery_loop import (
    LAST_SECONDS,
    DeliveryLoop,
    Destination,
)
from tracking.outbox import logger
from tracking.processes import raise_priority, start_idle

_PATIENCE_SECONDS = (0.5, 30.0)


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
            self._process.wait(max(deadline - time.monotonic(), 0.0) + LAST_SECONDS)
        self._process.kill()  # the outcome of a running request counts as unknown
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the child runs, or will be started again."""
        return self._thread.is_alive()

    def _start(self) -> subprocess.Popen[str]:
        process = start_idle(
            [sys.executable, "-P", "-m", "tracking.delivery_process"], self._environment
        )
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
