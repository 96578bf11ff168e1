"""Describe a command that did not end in time: the stacks of its processes, and its logs.

What must not live here: how long a command may take (`commandline.py`).
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from sweeps.engine.process_cleanup import scratch_directory
from sweeps.sweep_lock import read_holder
from trainable.watch.heartbeat import DUMP_STACKS

_DUMP_SECONDS, _END_SECONDS = 2.0, 30.0
_LAST_LINES = 40
_LOGS = ("raylet.out", "gcs_server.out")


def end_hung_command(process: subprocess.Popen[Any], root: Path) -> str:
    """End a command that hangs, and return what it was doing.

    The driver writes the stacks of its threads to its standard error, and a worker into its
    trial's log.

    Args:
        process: The command, whose output is piped.
        root: The root of its sweeps.
    """
    parts = []
    with contextlib.suppress(psutil.Error):
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]:
            with contextlib.suppress(psutil.Error):
                parts.append(f"{each.pid} {each.status()} {' '.join(each.cmdline())[:200]}")
                if _catches(each.pid, DUMP_STACKS):
                    each.send_signal(DUMP_STACKS)
    time.sleep(_DUMP_SECONDS)
    parts += [f"{path}:\n{_last_lines(path)}" for path in _logs(root)]
    parts.append(f"heartbeats: {[path.name for path in sorted(root.glob('*/control/*'))]}")
    process.kill()
    process.wait(_END_SECONDS)
    try:
        stdout, stderr = process.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired as late:  # another process has the pipes open
        stdout, stderr = late.stdout, late.stderr
    return "\n\n".join([*parts, f"standard output:\n{stdout}", f"standard error:\n{stderr}"])


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which otherwise would end it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _logs(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("*/trials/*/trial*.log"))
    for lock in root.glob("*/lock"):
        if (holder := read_holder(lock)) is not None:
            logs = scratch_directory(holder.token) / "ray/session_latest/logs"
            yield from (logs / name for name in _LOGS)


def _last_lines(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    except OSError as error:
        return str(error)
