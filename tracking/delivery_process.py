"""A drain in a process of its own, and the pipe to it.

A request to a tracking server is mostly work for the interpreter, which a driver needs for its
trials; and mlflow would stay in its memory. The process ends when its input does, so that it never
outlives the driver, whatever ends that; being killed costs nothing, because the outbox knows what
was under way. What must not live here: what the loop does (see `tracking.delivery_loop`).

    python -m tracking.delivery_process

reads its destination as a line of JSON, and after it a line for each call.
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

from tracking.delivery import logger
from tracking.delivery_loop import (
    LAST_SECONDS,
    NOT_YET,
    DeliveryLoop,
    DeliveryProgress,
    Destination,
)
from tracking.idle_process import start_idle

_PATIENCE_SECONDS = (0.5, 30.0)


class DeliveryProcess:
    """The drain of a driver. Should it be killed, another one is started.

    Args:
        destination: From where, and to where.
        environment: Of the process.
    """

    def __init__(self, destination: Destination, environment: Mapping[str, str]) -> None:
        self.ready = threading.Event()
        self.progress = NOT_YET
        self._destination = destination
        self._environment = environment
        self._closing = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._listen, name="tracking-outbox", daemon=True)
        self._thread.start()

    def flush_now(self, wanted: bool) -> None:
        """Somebody waits for the outbox to be empty, or no longer does."""
        _write(self._process.stdin, ["flush_now", wanted])

    def close(self, deadline: float) -> None:
        """Wait until the outbox is empty, at the latest until the deadline (monotonic)."""
        self._closing.set()
        _write(self._process.stdin, ["close", deadline])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline - time.monotonic(), 0.0) + LAST_SECONDS)
        self._process.kill()  # of a request under way nothing is assumed
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether it delivers still."""
        return self._thread.is_alive()

    def _start(self) -> subprocess.Popen[str]:
        process = start_idle(
            [sys.executable, "-P", "-m", "tracking.delivery_process"], self._environment
        )
        _write(process.stdin, self._destination)
        return process

    def _listen(self) -> None:
        delay, longest = _PATIENCE_SECONDS
        while True:
            # Closing its input fails on what it was told last and never read.
            with contextlib.suppress(BrokenPipeError), self._process as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.endswith("\n"):  # else it was killed while it wrote
                        self._hear(*json.loads(line))
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
            if self._closing.is_set():  # whoever closes may have spoken to the last one
                self._process.kill()

    def _hear(self, kind: str, said: list[Any]) -> None:
        if kind == "log":
            logger.log(*said)
            return
        self.progress = DeliveryProgress(*said)
        if self.progress.ready:
            self.ready.set()


def _write(pipe: IO[str] | None, said: object) -> None:
    """Send a line to a process that may have ended."""
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # its end; our end of it, closed
        pipe.write(json.dumps(said) + "\n")
        pipe.flush()


class _StatusWriter(logging.Handler):
    """Hands on what is logged."""

    def __init__(self, pipe: IO[str]) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        _write(self._pipe, ["log", [record.levelno, "%s", record.getMessage()]])


def _obey(drain: DeliveryLoop) -> None:
    for line in sys.stdin:
        verb, said = json.loads(line)
        if verb == "flush_now":
            drain.flush_now(said)
        else:
            drain.close(said)
    os._exit(1)  # the driver has ended, and did not say so


def main() -> None:
    """Deliver for the process at the other end of standard input and output."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # sent to all of a job: the driver decides
        signal.signal(signum, signal.SIG_IGN)
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no message
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_StatusWriter(pipe))
    destination = Destination(*json.loads(sys.stdin.readline()))

    def tell(progress: DeliveryProgress) -> None:
        # Each full collection would look through all that mlflow has imported, which took a fifth
        # of the time.
        if progress.ready and not gc.get_freeze_count():
            gc.freeze()
        _write(pipe, ["progress", progress])

    drain = DeliveryLoop(destination, tell)
    threading.Thread(target=_obey, args=[drain], daemon=True).start()
    drain.run()
    os._exit(0)  # a thread still reads standard input, which the interpreter's end would wait for


if __name__ == "__main__":
    main()
