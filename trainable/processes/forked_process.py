"""The processes that an actor of Ray starts for its trials: a fresh fork for each attempt.

The actor itself trains nothing and imports no torch. It lives on between trials, because a new
actor takes seconds. If the process of a trial ends by itself, the actor ends in the same way: so
Ray and the driver see the loss of a worker, with its exit code. What must not live here: what the
processes do, and the forking (`fork_template.py`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from trainable.processes.fork_template import CODE


def template_command() -> list[str]:
    """Return the command that starts a template in a Python of its own."""
    return [sys.executable, "-P", "-m", "trainable.processes.fork_template"]


class ForkedProcess:
    """Calls one function after the other, each in a fresh process. One runs at a time.

    The template starts at once, with this process' environment, and ends with this process.
    """

    def __init__(self, command: Sequence[str], before: str | None = None) -> None:
        self._before = before
        self._control, theirs = socket.socketpair()
        with theirs:
            self._template = subprocess.Popen(command, stdin=theirs.fileno(), process_group=0)
        self._connection: Connection | None = None

    @property
    def is_running(self) -> bool:
        """Whether a process has begun, and `end` was not called since."""
        return self._connection is not None

    def begin(self, function: str, *arguments: Any) -> None:
        """Call a function in a fresh process with its connection and the arguments."""
        assert self._connection is None, "the process before has not ended"
        ours, theirs = Pipe()
        self._connection = ours
        with theirs:
            self._send_template(theirs.fileno())
        self.send((sys.path, self._before, function, arguments))

    def send(self, message: object) -> None:
        """Send the process a message."""
        assert self._connection is not None
        with contextlib.suppress(OSError):  # it has ended, and `receive` finds out how
            self._connection.send(message)

    def receive(self) -> Any:
        """Return the next message of the process. If it has ended, this process ends like it."""
        assert self._connection is not None
        sources: list[Any] = [self._connection, self._control]
        while True:
            if self._connection in wait(sources):
                try:
                    return self._connection.recv()
                except (EOFError, OSError):  # its exit code follows
                    del sources[0]
                    continue
            end_like(self._exit_code())

    def end(self) -> int:
        """Wait until the process and all that it has started have ended; return its exit code."""
        code = self._exit_code()
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        return code

    def _send_template(self, stream: int) -> None:
        with contextlib.suppress(OSError):  # it has ended, and `receive` finds out how
            socket.send_fds(self._control, [b"f"], [stream])

    def _exit_code(self) -> int:
        code: int
        with contextlib.suppress(ConnectionError):
            if message := self._control.recv(CODE.size):
                (code,) = CODE.unpack(message)
                return code
        code = self._template.wait()  # killed, with its forks
        return code


def end_like(code: int) -> NoReturn:
    """End this process with an exit code, or by a signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the other process has left one
        with contextlib.suppress(OSError):  # no process can handle SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code)
