"""Check the limits of this machine: temporary space, inodes and resource limits.

What must not live here: free space of the sweep's directory (`run.doctor`), and memory.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

TEMPORARY = Path("/tmp")
"""The directory of Ray's sockets and logs, also if TMPDIR is set."""
_MIB = 2**20
_LEAST_SPACE = 64 * _MIB
_LEAST_INODES = 200
_LEAST = {
    "RLIMIT_AS": ("-v", 32 * 1024 * _MIB, "Ray and torch reserve far more addresses than memory"),
    "RLIMIT_FSIZE": ("-f", 1024 * _MIB, "Ray's object store and checkpoints are files"),
    "RLIMIT_NPROC": ("-u", 1_000, "Ray and torch start hundreds of threads"),
    "RLIMIT_NOFILE": ("-n", 512, "Ray holds hundreds of files and sockets open"),
}
"""For each limit: the option of `ulimit`, a value that suffices everywhere, and the reason."""
_SUFFICIENT = {name: least for name, (_, least, _) in _LEAST.items()}
_REQUIRED = {
    "RLIMIT_AS": 4608 * _MIB,  # measured on two cores: a sweep hung with 4 GiB, and ran with 5
    "RLIMIT_FSIZE": 8 * _MIB,
    "RLIMIT_NPROC": 64,
    "RLIMIT_NOFILE": 64,
}
"""The values below which a local Ray never starts, but waits until it times out."""
_OPEN_FILES = 4096
"""The value to which the soft limit on open files is raised."""


class LimitTooSmall(ValueError):
    """A limit of this process prevents Ray or torch from starting."""


def check_limits() -> None:
    """Raise the soft limit on open files, and check the limits that Ray requires."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST["RLIMIT_NOFILE"][1]:
        allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if found := [*_unusable(TEMPORARY), *_limits(_REQUIRED)]:
        raise LimitTooSmall("; ".join(found))


def shortages() -> list[str]:
    """Return a message for each limit that may be too low; empty if all suffice."""
    directories = dict.fromkeys((TEMPORARY, *_temporary_directory()))
    return [
        *(text for directory in directories for text in _space(directory)),
        *_limits(_SUFFICIENT),
    ]


def _temporary_directory() -> Iterator[Path]:
    try:
        yield Path(tempfile.gettempdir())
    except FileNotFoundError:  # no directory is writable, not even /tmp
        return


def _unusable(directory: Path) -> Iterator[str]:
    try:
        found = os.statvfs(directory)
    except OSError as error:
        yield (
            f"{directory} cannot be used ({error.strerror}); temporary files need it; create it"
        )
        return
    if not os.access(directory, os.W_OK | os.X_OK):
        yield (
            f"{directory} cannot be written to by user {os.getuid()}; temporary files need it; "
            f"make it writable (chmod 1777 {directory})"
        )
    elif found.f_files and not found.f_favail:
        yield f"{directory} has no free inodes; each file takes one; remove files there"
    elif not found.f_bavail:
        yield f"{directory} has 0 MiB free; Ray writes its logs there; free some"


def _space(directory: Path) -> Iterator[str]:
    if unusable := list(_unusable(directory)):
        yield from unusable
        return
    found = os.statvfs(directory)
    if found.f_files and found.f_favail < _LEAST_INODES:
        yield (
            f"{directory} has {found.f_favail} free inodes; each file takes one; remove files "
            "there"
        )
    if found.f_bavail * found.f_frsize < _LEAST_SPACE:
        yield (
            f"{directory} has {found.f_bavail * found.f_frsize // _MIB} MiB free; Ray writes its "
            f"logs there and needs {_LEAST_SPACE // _MIB} MiB; free some"
        )


def _limits(below: Mapping[str, int]) -> Iterator[str]:
    """Yield a message for each limit below these values; the remedy is a value that suffices."""
    for name, (option, least, why) in _LEAST.items():
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft == resource.RLIM_INFINITY or soft >= below[name]:
            continue
        # RLIMIT_NPROC does not apply to root.
        if name == "RLIMIT_NPROC" and os.geteuid() == 0:
            continue
        counted = name in ("RLIMIT_NPROC", "RLIMIT_NOFILE")
        value = str(soft) if counted else f"{soft // _MIB} MiB"
        needed = str(least) if counted else f"{least // _MIB} MiB"
        remedy = f"raise it to {needed} or more, or with: ulimit {option} unlimited"
        if counted:
            remedy = f"raise it with: ulimit {option} {needed}"
        yield f"ulimit {option} is {value}; {why}; {remedy}"
