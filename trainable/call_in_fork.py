"""Call a function in a fork of this process, and receive what it returns.

What must not live here: what is called, and the processes that train (`processes`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from trainable.process_start import end_with_parent
from trainable.seeding import reseed


class ForkEnded(Exception):
    """A fork of this process ended without an answer, or was late."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code
        """The exit code; negative for a signal."""


_threads: int | None = None
"""How many threads forks have; None: as many as this process."""


def keep_to_one_thread() -> None:
    """Let this process compute in one thread, and its forks in as many as it would.

    A fork has none of the threads of a process, and would wait for them for ever.
    """
    global _threads
    _threads = torch.get_num_threads()
    torch.set_num_threads(1)


def in_fork(
    function: Callable[..., Any],
    *arguments: Any,
    deadline: float = math.inf,
    quiet: bool = True,
) -> Any:
    """Return what a function returns in a fork of this process, which then is killed."""
    ours, theirs = Pipe(duplex=False)
    with ours:
        if not (pid := os.fork()):
            _answer(theirs, function, arguments, quiet=quiet)
        theirs.close()
        status, left = None, deadline - time.monotonic()
        try:
            if ours.poll(None if left == math.inf else max(0.0, left)):
                return ours.recv()
        except EOFError:  # the task has ended its process
            _, status = os.waitpid(pid, 0)
        finally:
            with contextlib.suppress(OSError):  # what the task has left
                if status is None:
                    os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)
            if status is None:
                os.waitpid(pid, 0)
    raise ForkEnded(-signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status))


def _answer(
    answers: Connection, function: Callable[..., Any], arguments: Sequence[Any], *, quiet: bool
) -> NoReturn:
    """Send what a function returns, and end this process."""
    code = 1
    try:
        os.setpgid(0, 0)
        end_with_parent()
        if quiet:  # what ends the task is printed where it is examined
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
        reseed()
        if _threads is not None:
            torch.set_num_threads(_threads)
        warnings.simplefilter("ignore")
        answers.send(function(*arguments))
        code = 0
    # whatever the user's code raises, this process must not go on as its parent
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
