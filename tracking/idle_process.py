"""A process for what nobody should wait for: it runs where nobody else wants the processor.

Ray starts its workers at niceness 15, so that no niceness puts bookkeeping far enough behind
training: 19 takes a third of a processor that both want. Who is started here may stand still for a
second on a busy machine, so that it should hold no lock for longer than it must. What must not
live here: what such a process does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence


def start_behind(
    command: Sequence[str], environment: Mapping[str, str], *, silent: bool = False
) -> subprocess.Popen[str]:
    """Start a process with a pipe for its input.

    It is spared the signals of a terminal, which are for whoever started it: its end should be
    that of its input. Where there is no idle class of scheduling, it gets the highest niceness.

    Args:
        command: A program and its arguments.
        environment: Of the process.
        silent: Discard what it prints; default: its standard output is a pipe.

    Raises:
        OSError: The system starts no process.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if silent else subprocess.PIPE,
        stderr=subprocess.DEVNULL if silent else None,
        text=True,
        env=environment,
        process_group=0,
    )
    with contextlib.suppress(OSError):  # it has ended; or a sandbox does not allow it
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    return process
