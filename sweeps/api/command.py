"""Run the `sweep` command as a child process, for a script or a notebook.

A killed notebook is a killed driver (`sweeps.entry`), and the notebook itself never holds Ray.
What must not live here: what the command does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any

from tracking.child_process import start_python

_SWEEP = ("-m", "sweeps.entry")
_SECONDS_BETWEEN_LOOKS = 0.5
_DEMAND_COLOURS = {"CLICOLOR_FORCE", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}


class SweepCommandError(RuntimeError):
    """A command on a sweep has failed.

    Examples:
        >>> from sweeps import SweepCommandError
        >>> try:
        ...     Sweep.from_file("sweep.yaml").run()
        ... except SweepCommandError as error:
        ...     print(error.exit_code)

    Attributes:
        exit_code: The command's exit code: 2 if the input is wrong, 3 if no trial succeeded, 4 if
            another process holds the sweep.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_command(arguments: Sequence[str], look: Callable[[], None] = lambda: None) -> None:
    """Run a command to its end; in a terminal it shows what it always shows.

    Ctrl-C, or an interrupt of the kernel, drains the sweep as it does for the command, and then
    raises KeyboardInterrupt; `Sweep.resume` continues.

    Args:
        arguments: The command's arguments, such as `["run", "sweep.yaml"]`.
        look: Called twice a second in a notebook, which shows no terminal output.

    Raises:
        SweepCommandError: The command ended with an error.
        KeyboardInterrupt: The command was interrupted, and has ended.
    """
    if not in_notebook():
        # The child is in the terminal's process group: Ctrl-C reaches it without being passed on.
        child = start_python(*_SWEEP, *_bound(arguments), own_session=False)
        _judge(arguments, _wait(child, lambda: None, lambda: None), "")
        return
    with tempfile.TemporaryFile("w+") as output:
        child = start_unseen(_bound(arguments), output)
        code = _wait(child, look, lambda: child.send_signal(signal.SIGINT))
        _judge(arguments, code, _end_of(output))


def read_command(arguments: Sequence[str]) -> Any:
    """Run a command that prints JSON, and return what it printed.

    Raises:
        SweepCommandError: The command ended with an error; the message is its own.
        KeyboardInterrupt: The command was interrupted.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        child = start_unseen(_bound(arguments), output, messages)
        code = _wait(child, lambda: None, lambda: child.send_signal(signal.SIGINT))
        _judge(arguments, code, _end_of(messages))
        output.seek(0)
        return json.load(output)


def _bound(arguments: Sequence[str]) -> list[str]:
    """Return a command that ends with this process."""
    return ["--child-of", str(os.getpid()), *arguments]


def start_unseen(
    arguments: Sequence[str], output: IO[str], messages: IO[str] | int = subprocess.STDOUT
) -> subprocess.Popen[str]:
    """Start a command that writes to files and reads nothing.

    A kernel of Jupyter has variables that demand colours, with which the command would draw as on
    a terminal.
    """
    kept = {key: value for key, value in os.environ.items() if key not in _DEMAND_COLOURS}
    return start_python(
        *_SWEEP,
        *arguments,
        environment=kept,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=messages,
    )


def _judge(arguments: Sequence[str], code: int, said: str) -> None:
    """Raise the exception of an exit code, with what the command said; none if it succeeded."""
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        name = f"`sweep {arguments[0]}` ended with exit code {code}"
        raise SweepCommandError(f"{name}:\n{said}" if said else f"{name}; see its message", code)


def in_notebook() -> bool:
    """Whether this process is a kernel of Jupyter, in which only Python code can print."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _wait(
    child: subprocess.Popen[str], look: Callable[[], None], interrupted: Callable[[], None]
) -> int:
    """Wait for the child's end, through any number of interrupts; return its exit code."""
    try:
        while True:
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(_SECONDS_BETWEEN_LOOKS)
                look()
            except KeyboardInterrupt:  # also while it looks
                interrupted()
    finally:
        if child.poll() is None:  # `look` failed: no driver continues unseen
            child.kill()
            child.wait()


def _end_of(output: IO[str]) -> str:
    """Return the last lines of what the command printed."""
    output.seek(0)
    return "".join(output.readlines()[-40:]).strip()
