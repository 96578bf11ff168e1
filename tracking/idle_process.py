"""Run a subprocess in the scheduling class SCHED_IDLE: it gets only processor time left over.

Niceness is not enough: Ray starts its workers at niceness 15, and a process at 19 still takes a
third of a processor beside one of them. On a busy machine an idle process may get no processor
time for a whole second, so it should hold locks only briefly. What must not live here: what such a
process does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence


def start_idle(
    command: Sequence[str], environment: Mapping[str, str], *, silent: bool = False
) -> subprocess.Popen[str]:
    """Start an idle process with a pipe for its standard input.

    It has a process group of its own, so it gets no signals of the terminal. It should exit at the
    end of its standard input. Without SCHED_IDLE it gets the highest niceness.
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
    with contextlib.suppress(OSError):  # the process has ended, or a sandbox forbids it
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    return process


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
