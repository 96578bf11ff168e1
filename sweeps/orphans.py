"""The processes a driver starts, and how they are found again once it is dead.

A driver's lock token marks everything it starts, in two ways: it stands in the environment that
every process below inherits, and in the name of the directory that its Ray writes to. Some Ray
processes overwrite their environment with their title, but all of them keep a log file open there.
So "the processes of that driver" needs no list of process ids, which could have been reused, and
never names anyone else's Ray.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import psutil

TOKEN_VARIABLE = "GRADSWEEP_DRIVER"
_GRACE_SECONDS = 3.0


def scratch_directory(token: str) -> Path:
    """The directory for the temporary files of a driver's Ray.

    It lies in /tmp whatever TMPDIR says: Ray's sockets below it must stay within the 107
    characters of a Unix socket's address.
    """
    return Path("/tmp") / f"gradsweep-{token[:12]}"


def mark_children(token: str) -> None:
    """Mark every process that this one starts from now on."""
    os.environ[TOKEN_VARIABLE] = token


def find_orphans(token: str) -> list[psutil.Process]:
    """The live processes, other than this one, that carry a driver's token."""
    scratch = f"{scratch_directory(token)}{os.sep}"
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and _is_marked(process, token, scratch):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # gone meanwhile, or someone else's
    return found


def end_orphans(token: str) -> int:
    """End a dead driver's processes, first politely, then by force, and remove their files.

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
    shutil.rmtree(scratch_directory(token), ignore_errors=True)
    return len(orphans)


def kill_children(token: str) -> None:
    """Kill this driver's processes and remove their files at once, without waiting."""
    for process in find_orphans(token):
        _signal(process, force=True)
    shutil.rmtree(scratch_directory(token), ignore_errors=True)


def _is_marked(process: psutil.Process, token: str, scratch: str) -> bool:
    if process.environ().get(TOKEN_VARIABLE) == token:
        return True
    return any(file.path.startswith(scratch) for file in process.open_files())


def _signal(process: psutil.Process, *, force: bool) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill() if force else process.terminate()
