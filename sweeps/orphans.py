"""The processes a driver starts, and how they are found again once it is dead.

A driver puts its lock token into its environment before it starts Ray; every process below it
inherits that. So "the processes of that driver" needs no list of process ids, which could
have been reused, and never names anyone else's Ray.
"""

from __future__ import annotations

import contextlib
import os

import psutil

TOKEN_VARIABLE = "GRADSWEEP_DRIVER"
_GRACE_SECONDS = 3.0


def mark_children(token: str) -> None:
    """Mark every process that this one starts from now on."""
    os.environ[TOKEN_VARIABLE] = token


def find_orphans(token: str) -> list[psutil.Process]:
    """The live processes, other than this one, that carry a driver's token."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(TOKEN_VARIABLE) == token:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # gone meanwhile, or someone else's
    return found


def end_orphans(token: str) -> int:
    """End a dead driver's processes: first politely, then by force.

    Returns:
        How many there were.
    """
    orphans = find_orphans(token)
    for process in orphans:
        _signal(process, force=False)
    _, stubborn = psutil.wait_procs(orphans, timeout=_GRACE_SECONDS)
    for process in stubborn:
        _signal(process, force=True)
    psutil.wait_procs(stubborn, timeout=_GRACE_SECONDS)
    return len(orphans)


def kill_children(token: str) -> None:
    """Kill this driver's processes at once, without waiting."""
    for process in find_orphans(token):
        _signal(process, force=True)


def _signal(process: psutil.Process, *, force: bool) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill() if force else process.terminate()
