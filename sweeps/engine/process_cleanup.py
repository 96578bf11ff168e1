"""The processes a driver starts, and how they are found again once it is dead.

A driver's lock token marks everything it starts, in two ways: it stands in the environment that
every process below inherits, and in the name of the directory that its Ray writes to. Some Ray
processes overwrite their environment with their title, but all of them write to a log file there.
So "the processes of that driver" needs no list of process ids, which could have been reused, and
never names anyone else's Ray.

The driver holds a lock in that directory for as long as it lives: whoever can take it knows that
the driver is dead, whatever sweep it ran and wherever that lies, and cleans up.
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
_TOKEN_DIGITS = 32  # as `lock` makes them
_DIGITS = 12
"""How much of a token stands in the name of its directory."""
_ALIVE = "driver"
"""The file in a driver's directory that it holds a lock on."""


def scratch_directory(token: str) -> Path:
    """The directory for the temporary files of a driver's Ray; nobody else may enter it.

    It lies in /tmp whatever TMPDIR says: Ray's sockets below it must stay within the 107
    characters of a Unix socket's address.
    """
    return _PLACE / f"{_PREFIX}{token[:_DIGITS]}"


def tag_child_processes(token: str) -> None:
    """Mark every process that this one starts from now on."""
    os.environ[TOKEN_VARIABLE] = token


def untagged_env() -> dict[str, str]:
    """Return the environment of a process that outlives the driver's Ray, with which all that is
    marked is ended.
    """
    return {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}


def claim_scratch(token: str) -> IO[str]:
    """Make a driver's directory.

    Returns:
        What says that the driver lives: to be kept open for as long as it does.
    """
    # Made aside and renamed: nobody ever sees the directory without a lock held in it. Until the
    # lock is held this driver may be taken for dead and its directory be removed: then once more.
    aside = _PLACE / f".{_PREFIX}{token}"
    while True:
        aside.mkdir(mode=0o700, exist_ok=True)  # Ray lets everybody write to what it makes below
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            alive = stack.enter_context(open(aside / _ALIVE, "w", encoding="utf-8"))
            fcntl.flock(alive, fcntl.LOCK_EX)
            aside.rename(scratch_directory(token))
            stack.pop_all()  # held while the driver lives
            return alive


def dead_drivers() -> Iterator[str]:
    """The tokens, as far as their directories' names hold them, of this user's drivers that are
    dead and left something behind.
    """
    for directory in sorted(_PLACE.glob(f"{_PREFIX}{'[0-9a-f]' * _DIGITS}")):
        if not _is_ours(directory):
            continue
        with contextlib.suppress(OSError):  # not ours, gone meanwhile, or its driver lives
            with open(directory / _ALIVE, "r+", encoding="utf-8") as alive:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield directory.name.removeprefix(_PREFIX)


def _remove_unfinished() -> Iterator[str]:
    """Remove what drivers left that died before they had made their directory; yield their tokens
    as `dead_drivers` does.
    """
    for aside in sorted(_PLACE.glob(f".{_PREFIX}{'[0-9a-f]' * _TOKEN_DIGITS}")):
        if not _is_ours(aside):
            continue
        with contextlib.suppress(OSError):  # as above
            # Made here when the driver died before it did.
            with open(aside / _ALIVE, "a", encoding="utf-8") as alive:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(aside)
            yield aside.name.removeprefix(f".{_PREFIX}")[:_DIGITS]


def _is_ours(directory: Path) -> bool:
    """Whether this user made it: its name says whose processes are to end, and everybody may make
    directories there.
    """
    try:
        return directory.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def clean_up_dead_drivers(*known: str) -> tuple[int, int]:
    """End what dead drivers left running, of whatever sweep, and remove their files.

    Args:
        known: Tokens of drivers that are known to be dead, whose directories may be gone.

    Returns:
        How many drivers left something, and how many processes.
    """
    tokens = {*dead_drivers(), *_remove_unfinished()}
    ended = {token: end_orphans(token) for token in tokens | {token[:_DIGITS] for token in known}}
    return sum(1 for token, count in ended.items() if count or token in tokens), sum(
        ended.values()
    )


def find_orphans(token: str) -> list[psutil.Process]:
    """The live processes, other than this one, that carry a driver's token, or its beginning as
    in the name of its directory.
    """
    scratch = f"{scratch_directory(token)}{os.sep}"
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and _is_marked(process, token, scratch):
                found.append(process)
        except (psutil.Error, OSError):
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
    """Kill this driver's processes and remove their files at once, without waiting for more than
    what was being started meanwhile.
    """
    known: set[psutil.Process] = set()
    while new := set(find_orphans(token)) - known:
        for process in new:
            _signal(process, force=True)
        known |= new
    shutil.rmtree(scratch_directory(token), ignore_errors=True)


def _is_marked(process: psutil.Process, token: str, scratch: str) -> bool:
    if process.environ().get(TOKEN_VARIABLE, "").startswith(token):
        return True
    # Who only reads there is somebody who looks: `tail -f`, an editor, a backup.
    return any(file.path.startswith(scratch) and file.mode != "r" for file in process.open_files())


def _signal(process: psutil.Process, *, force: bool) -> None:
    with contextlib.suppress(psutil.Error):  # as above
        process.kill() if force else process.terminate()
