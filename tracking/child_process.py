"""Start Python in a child process: for a request and its reply, or for as long as this one runs.

A child keeps torch, MLflow and Plotly out of this process' memory, and a task's code cannot do
harm here. Each child starts with `-P`, which keeps the working directory off its import path, and
in a session of its own: it gets no signals of the terminal and cannot ask there for a password.

Beside training, niceness is not enough for a child: Ray starts its workers at niceness 15, and a
process at 19 still takes a third of a processor beside one of them. In the class SCHED_IDLE it may
get no time for a whole second on a busy machine, so it should hold locks only briefly. What must
not live here: what a child does, and what its failure means.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from redaction.secrets import redact

_SECONDS_TO_END = 5.0
"""How long a child may run after its reply; the threads of a task may keep it alive."""


def start_python(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    own_session: bool = True,
    **streams: Any,
) -> subprocess.Popen[str]:
    """Start Python with arguments, such as `-m` and a module; `streams` are those of `Popen`.

    It has this process' environment unless another is given. Without a session of its own, the
    terminal's signals reach it with this process.
    """
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        env=environment,
        start_new_session=own_session,
        text=True,
        errors="replace",  # what a task prints need not be text
        **streams,
    )


def end_group(process: subprocess.Popen[str], patience: float = 0.0) -> None:
    """Kill a child that has a session of its own, with its child processes, and wait for its end.

    With patience it gets SIGTERM first, and this many seconds.
    """
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        if patience:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        os.killpg(process.pid, signal.SIGKILL)  # also those that outlive the child
    process.wait()


def lower_priority(process: subprocess.Popen[str]) -> None:
    """Let a child run only while the CPU is idle; without SCHED_IDLE it gets niceness 19."""
    with contextlib.suppress(OSError):  # the process has ended, or a sandbox forbids it
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))


def raise_priority(process: subprocess.Popen[str]) -> None:
    """Give an idle process the caller's priority, because something waits for it now.

    The system may allow that to its administrator alone; elsewhere the process stays idle.
    """
    if process.poll() is not None:  # another process may have its number
        return
    threads: list[str] = []
    with contextlib.suppress(OSError):  # no such file system, or the process has ended
        threads = os.listdir(f"/proc/{process.pid}/task")
    for thread in map(int, threads):  # priorities are theirs
        with contextlib.suppress(OSError):  # forbidden, or the thread has ended
            os.sched_setscheduler(thread, os.sched_getscheduler(0), os.sched_getparam(0))
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0))


class ChildFailed(Exception):
    """A child ended with an error; its text is the reason in one line."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        """The exit code; negative for a signal."""


class ChildProcess:
    """Runs a module with arguments, and with requests on its standard input, a line each.

    It starts at once; `reply` waits for it. It ends with the `with` statement. `launcher` is a
    program with arguments that starts the module. Without a session of its own, whoever ends the
    caller's process group ends the child, too.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        requests: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        own_session: bool = True,
    ) -> None:
        self._own_session = own_session
        # Files and no pipes: the child's own child processes may keep them open.
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        with tempfile.TemporaryFile("w+") as lines:
            lines.writelines(f"{request}\n" for request in requests)
            lines.seek(0)
            self._process = start_python(
                *launcher,
                "-m",
                module,
                *arguments,
                environment=environment,
                own_session=own_session,
                stdin=lines,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
            )

    def reply(self, seconds: float = threading.TIMEOUT_MAX) -> list[str]:
        """Return the lines that the child prints until an empty one, or its end; then end it.

        It is killed after this many seconds.
        """
        assert self._process.stdout is not None
        late = threading.Timer(seconds, self._kill)
        late.daemon = True
        late.start()
        try:
            lines = list(takewhile(str.strip, self._process.stdout))
            late.cancel()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)
            self._stderr.seek(0)
            self._printed = self._stderr.read().strip().splitlines()
        finally:
            late.cancel()
            self.terminate()
        # A line without its end: the child was killed while it wrote.
        return [line.rstrip("\n") for line in lines if line.endswith("\n")]

    @property
    def code(self) -> int:
        """The exit code after the reply; negative for a signal."""
        return self._process.returncode

    @property
    def last_words(self) -> str:
        """The last line on the child's standard error; without one, its exit code."""
        return redact(self._printed[-1]) if self._printed else f"exit code {self.code}"

    def terminate(self) -> None:
        """Kill the child and its own child processes, if they run."""
        if not self._stderr.closed:  # once closed, the group's id may belong to other processes
            with self._stderr, self._process:
                self._kill()

    def _kill(self) -> None:
        if self._own_session:
            end_group(self._process)
        else:
            self._process.kill()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


def run_child(
    module: str,
    *arguments: str,
    requests: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
    seconds: float = threading.TIMEOUT_MAX,
) -> str:
    """Run a module as `ChildProcess` does; return the last line that it prints, or nothing.

    Raises:
        ChildFailed: It ended with an error, or was killed after so many seconds.
    """
    deadline = time.monotonic() + seconds
    with ChildProcess(
        module, *arguments, requests=requests, environment=environment, launcher=launcher
    ) as child:
        lines = child.reply(seconds)
    if child.code == 0:
        return lines[-1] if lines else ""
    reason = child.last_words
    if child.code < 0 and time.monotonic() >= deadline:
        reason = f"it has not answered for {seconds:g} s"
    elif child.code < 0:
        reason = (
            f"its process was ended by {signal.Signals(-child.code).name}, probably because "
            "the machine is short of memory; free some, then try again"
        )
    elif reason == f"exit code {child.code}":
        reason = f"its process ended with {reason}"
    raise ChildFailed(child.code, reason)
