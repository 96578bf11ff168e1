"""Which processes of this machine have locked a file.

The kernel lists locks, also those of other users, in /proc/locks. Asking with `fcntl` would need
the file to be opened, and closing it would release SQLite's own locks of this process. What must
not live here: what to do about a holder.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NamedTuple


class LockHolder(NamedTuple):
    """A process that holds a lock."""

    pid: int
    """-1 if the kernel does not know: locks of open files belong to no process."""
    exclusive: bool
    """Whether nobody else can lock the same part of the file."""

    @property
    def user(self) -> int | None:
        """The id of its user; None if it has ended or is not known."""
        try:
            return os.stat(f"/proc/{self.pid}").st_uid
        except OSError:
            return None


def lock_holders(path: str | os.PathLike[str], *kinds: str) -> list[LockHolder]:
    """Return who has locked a file, in the order of the kernel."""
    try:
        found = os.stat(path, follow_symlinks=False)
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    fields = (line.split() for line in lines if " -> " not in line)  # those who wait
    return [
        LockHolder(int(each[4]), each[3] == "WRITE")
        for each in fields
        if each[1] in kinds and each[5] == wanted
    ]


def describe_database_lock(path: Path) -> tuple[str, str]:
    """Return who has locked an SQLite database, and a remedy."""
    found = [
        holder
        for suffix in ("", "-wal", "-shm")
        for holder in lock_holders(Path(os.path.realpath(f"{path}{suffix}")), "POSIX", "OFDLCK")
        if holder.pid != os.getpid()
    ]
    # A process of another user comes first: those of this one may be the sweep's own.
    found.sort(key=lambda holder: holder.user in (None, os.geteuid()))
    if not found:
        return "another process", "end the process that has it open"
    return _described(found[0], path)


def user_name(user: int) -> str:
    """Return the name of a user, or the id of one without an account."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _described(holder: LockHolder, path: Path) -> tuple[str, str]:
    if holder.pid < 0:
        return (
            "a process that the kernel does not name",
            f"find it with: fuser {path}; end it, or keep others out: chmod go= {path.parent}",
        )
    if (user := holder.user) is None or user == os.geteuid():
        return f"process {holder.pid}", "end it"
    return (
        f"process {holder.pid} of user {user_name(user)}",
        f"have that user end it, and keep other users out: chmod go= {path.parent}",
    )
