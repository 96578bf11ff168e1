"""Run a piece of work in a Python process of its own: a request goes in, a reply comes out.

Here torch, MLflow and Plotly would stay in memory, and a task's code could do harm. What must not
live here: what a child does, and what its failure means.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from itertools import takewhile
from types import MappingProxyType

from redaction.secrets import redact
from sweeps.engine import fork_server

_SECONDS_TO_END = 5.0
"""How long a child may run after its reply; the threads of a task may keep it alive."""


class ChildFailed(Exception):
    """A child ended with an error; its text is the reason in one line."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        """The exit code; negative for a signal."""


class ChildProcess:
    """Runs a module with arguments, and with requests on its standard input, a line each.

    It starts at once; `reply` waits for it. It ends with the `with` statement. It has a process
    group of its own, so that only the caller handles Ctrl-C, unless it ends with the caller's.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        requests: Iterable[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        in_own_group: bool = True,
    ) -> None:
        self._kill_group = in_own_group
        # Files and no pipes: the child's own child processes may keep them open.
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        with tempfile.TemporaryFile("w+") as lines:
            lines.writelines(f"{request}\n" for request in requests)
            lines.seek(0)
            self._process = subprocess.Popen(
                fork_server.run_module(module, *arguments),
                stdin=lines,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                errors="replace",  # what a task prints need not be text
                env={**os.environ, **environment},
                process_group=0 if in_own_group else None,
            )

    def reply(self) -> list[str]:
        """Return the lines that the child prints until an empty one, or its end; then end it."""
        assert self._process.stdout is not None
        try:
            lines = list(takewhile(str.strip, self._process.stdout))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)
            self._stderr.seek(0)
            self._printed = self._stderr.read().strip().splitlines()
        finally:
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
            with self._stderr, self._process, contextlib.suppress(ProcessLookupError):
                if self._kill_group:
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


def run_child(module: str, *arguments: str) -> str:
    """Run a module with arguments, and return the last line that it prints; empty without one."""
    with ChildProcess(module, *arguments) as child:
        lines = child.reply()
    if child.code == 0:
        return lines[-1] if lines else ""
    reason = child.last_words
    if child.code < 0:
        reason = (
            f"its process was ended by {signal.Signals(-child.code).name}, probably because "
            "the machine is short of memory; free some, then try again"
        )
    elif reason == f"exit code {child.code}":
        reason = f"its process ended with {reason}"
    raise ChildFailed(child.code, reason)
