"""A fresh process for each attempt of a trial: a fork of a template, which has imported the task.

    python -m trainable.processes.attempt_process

is the template; `AttemptProcess` starts it in the actor of a trial or rank, which trains nothing,
imports no torch, and lives on between trials, because a new actor takes seconds. For each attempt
the actor sends a connection, over which the fork receives what it calls. When the fork has ended,
all that it left behind is killed, and the actor receives the exit code. So no task ever runs in a
process in which another one has run.

    actor -- starts --> template (torch is imported)
      `- first attempt -->  a fork, which imports the task, and becomes the template of the others
                              `- attempt --> a fork, which has imported the task, and trains

The module of a task is imported as a part of the first attempt, so that its time, output and
errors are those of a trial. A module that starts threads, processes or CUDA as it is imported
cannot be forked: then each attempt imports it. What must not live here: what a fork does, and an
import that takes long, because a program of a task may import this module.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from trainable.process_start import adopt_orphans, end_with_parent, load_training
from trainable.seeding import reseed
from trainable.user_code.task_import import ARGUMENTS

_CODE = struct.Struct("i")
"""The message in which the actor receives an exit code; a negative one is a signal."""
_ENDING_SECONDS = 5.0
_NVML_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it `torch.cuda.is_available()`, which many modules call on import, does not start CUDA."""
_NVIDIA = "/proc/driver/nvidia"
"""There if the machine has a GPU; without one, asking NVML takes milliseconds each time."""

_HANDLES_FORKS = "jemalloc_bg_thd\n"
"""The name of a thread that pyarrow's allocator starts, which does without it in a fork."""


def template_command() -> list[str]:
    """Return the command that starts a template in a Python of its own."""
    return [sys.executable, "-P", "-m", "trainable.processes.attempt_process"]


class AttemptProcess:
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
            if message := self._control.recv(_CODE.size):
                (code,) = _CODE.unpack(message)
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


# The template

_control: socket.socket
_imported: set[str] = set()
"""The tasks that this process, or the template that it is a fork of, has imported."""


def main() -> None:
    """Import torch, and fork until the actor ends."""
    global _control
    _control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if os.path.exists(_NVIDIA):
        os.environ.setdefault(_NVML_VARIABLE, "1")
    adopt_orphans()
    load_training()
    _call(_serve())


def import_task(connection: Connection, name: str, load: Callable[[], bool]) -> None:
    """Import a task, unless a template has; return in a process that has imported it and no more.

    This process becomes a template, if it can be one, and its fork goes on.
    """
    if name not in _imported and load() and _can_fork():
        _imported.add(name)
        gc.freeze()  # a collection would write into memory that the forks share
        adopt_orphans()
        if trial := _fork():
            connection.close()
            _call(_serve(trial))
    _control.close()


def _serve(trial: int = 0) -> Connection:
    """Fork for each connection that arrives; return it in the fork."""
    while True:
        if trial:
            code = _end_of(trial)
            with contextlib.suppress(OSError):  # the actor has ended
                _control.send(_CODE.pack(code))
        request, streams, _, _ = socket.recv_fds(_control, 1, 1)
        if not request:
            os._exit(0)
        if not (trial := _fork()):
            os.set_inheritable(streams[0], False)
            return Connection(streams[0])
        os.close(streams[0])


def _fork() -> int:
    """Return the process id of a fork; in the fork 0. It ends with this process."""
    parent = os.getpid()
    if pid := os.fork():
        with contextlib.suppress(OSError):  # the fork does the same; either may be first
            os.setpgid(pid, pid)
        return pid
    os.setpgid(0, 0)
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    reseed()
    return 0


def _end_of(trial: int) -> int:
    """Wait until a fork has ended, kill all that it has started, and return its exit code."""
    handle = os.pidfd_open(trial)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(_control, 0)  # only whether the actor has ended
    leaves = any(number == _control.fileno() for number, _ in poll.poll())
    os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(trial, signal.SIGKILL)  # not reaped yet, so the id is not reused
    _, status = os.waitpid(trial, 0)
    _end_orphans()
    if leaves:
        os._exit(0)
    return os.waitstatus_to_exitcode(status)


def _end_orphans() -> None:
    """Kill what a fork has left, in any process group: the kernel makes it this one's child."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            import psutil

            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            time.sleep(0.002)


def _can_fork() -> bool:
    """Return whether forks of this process can train: it has one thread and no CUDA."""
    names = (Path(f"/proc/self/task/{one}/comm") for one in os.listdir("/proc/self/task"))
    if sum(name.read_text() != _HANDLES_FORKS for name in names) > 1:
        return False
    with contextlib.suppress(ChildProcessError):  # there is none
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return False
    import torch

    if not (probe := os.fork()):  # whether torch refuses CUDA is known in a fork alone
        refuses = torch.cuda._is_in_bad_fork() and torch.cuda.device_count() > 0
        os._exit(refuses)
    return os.waitpid(probe, 0)[1] == 0


def _call(connection: Connection) -> NoReturn:
    """Call what the actor asks for, and exit."""
    code = 1
    try:
        path, before, function, arguments = connection.recv()
        # Found before the directory of the task is on the path, which may have modules of the
        # same names.
        prepare, train = before and _find(before), _find(function)
        sys.path[:], sys.argv[:] = path, ARGUMENTS
        if prepare is not None:
            prepare()
        train(connection, *arguments)
        code = 0
    except BaseException:  # the process ends: nobody else would say why
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a task may have closed it
            stream.flush()
    os._exit(code)


def _find(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    from trainable.processes import attempt_process  # not the copy that runs as a program

    attempt_process.main()
