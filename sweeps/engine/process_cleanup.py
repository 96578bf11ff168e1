"""Find and end the processes that a dead driver has left running, and nobody else's.

The driver's token tags them, in an inherited environment variable and in the path of Ray's log
files: some Ray processes overwrite their environment. Process ids are reused, so none is stored. A
driver locks a file in its scratch directory while it lives: who gets that lock cleans up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

TOKEN_VARIABLE = "GRADSWEEP_DRIVER"
_GRACE_SECONDS = 3.0
_PLACE = Path("/tmp")
_PREFIX = "gradsweep-"
_TOKEN_DIGITS = 32  # as `sweep_lock` creates them
_DIGITS = 12
"""How many digits of the token are in the name of its directory."""
_ALIVE = "driver"
"""The file in a driver's directory that the driver keeps locked."""


def scratch_directory(token: str) -> Path:
    """Return the directory for the temporary files of a driver's Ray; only its user may enter it.

    It is in /tmp whatever TMPDIR says: a Unix socket's path has at most 107 characters.
    """
    return _PLACE / f"{_PREFIX}{token[:_DIGITS]}"


def tag_child_processes(token: str) -> None:
    """Tag all processes that this process starts from now on."""
    os.environ[TOKEN_VARIABLE] = token


def untagged_env() -> dict[str, str]:
    """Return the environment for a process that must survive when tagged processes are ended."""
    return {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}


def claim_scratch(token: str) -> IO[str]:
    """Create a driver's directory."""
    # Create the directory under another name, lock its file, and rename it, so that a directory
    # of the final name always has a locked file. Before the lock is held, another process may
    # consider this driver dead and remove the directory; the loop then tries again.
    aside = _PLACE / f".{_PREFIX}{token}"
    while True:
        aside.mkdir(mode=0o700, exist_ok=True)  # Ray's own files below are world-writable
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            alive = stack.enter_context(open(aside / _ALIVE, "w", encoding="utf-8"))
            fcntl.flock(alive, fcntl.LOCK_EX)
            aside.rename(scratch_directory(token))
            stack.pop_all()  # the caller keeps the file open
            return alive


def dead_drivers() -> Iterator[str]:
    """Yield the first digits of the tokens of this user's dead drivers that left a directory."""
    for directory in sorted(_PLACE.glob(f"{_PREFIX}{'[0-9a-f]' * _DIGITS}")):
        if not _is_ours(directory):
            continue
        with contextlib.suppress(OSError):  # removed meanwhile, or its driver is alive
            with open(directory / _ALIVE, "r+", encoding="utf-8") as alive:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield directory.name.removeprefix(_PREFIX)


def _remove_unfinished() -> Iterator[str]:
    """Remove the directories of drivers that died in `claim_scratch`, and yield their tokens."""
    for aside in sorted(_PLACE.glob(f".{_PREFIX}{'[0-9a-f]' * _TOKEN_DIGITS}")):
        if not _is_ours(aside):
            continue
        with contextlib.suppress(OSError):  # removed meanwhile, or its driver is alive
            # Mode "a" creates the file if the driver died before it did.
            with open(aside / _ALIVE, "a", encoding="utf-8") as alive:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(aside)
            # as many digits as `dead_drivers` yields
            yield aside.name.removeprefix(f".{_PREFIX}")[:_DIGITS]


def _is_ours(directory: Path) -> bool:
    """Whether this user created a directory in /tmp, where every user may create one."""
    try:
        return directory.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def clean_up_dead_drivers(*known: str) -> tuple[int, int]:
    """End the processes of all dead drivers of this user, and remove their files."""
    tokens = {*dead_drivers(), *_remove_unfinished()}
    ended = {token: end_orphans(token) for token in tokens | {token[:_DIGITS] for token in known}}
    return sum(1 for token, count in ended.items() if count or token in tokens), sum(
        ended.values()
    )


def find_orphans(token: str) -> list[psutil.Process]:
    """Return the live processes, other than this one, that are tagged with a driver's token."""
    scratch = f"{scratch_directory(token)}{os.sep}"
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and _is_marked(process, token, scratch):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # the process has ended, or is another user's
    return found


def end_orphans(token: str) -> int:
    """End a dead driver's processes by SIGTERM, then by SIGKILL, and remove their files."""
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
    """Kill this driver's processes without waiting for their end, and remove their files."""
    known: set[psutil.Process] = set()
    # The processes start others meanwhile.
    while new := set(find_orphans(token)) - known:
        for process in new:
            _signal(process, force=True)
        known |= new
    shutil.rmtree(scratch_directory(token), ignore_errors=True)


def _is_marked(process: psutil.Process, token: str, scratch: str) -> bool:
    if process.environ().get(TOKEN_VARIABLE, "").startswith(token):
        return True
    # A process that only reads there may be the user's: `tail -f`, an editor, a backup.
    return any(file.path.startswith(scratch) and file.mode != "r" for file in process.open_files())


def _signal(process: psutil.Process, *, force: bool) -> None:
    with contextlib.suppress(psutil.Error):  # the process has ended
        process.kill() if force else process.terminate()
