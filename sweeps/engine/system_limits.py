"""What this machine gives a process too little of: temporary space, inodes, resource limits.

What must not live here: free space of the sweep's own directory (`commands/doctor`), and memory.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

TEMPORARY = Path("/tmp")
"""Where Ray's sockets and logs lie, whatever TMPDIR says."""
_MIB = 2**20
_LEAST_SPACE = 64 * _MIB
_LEAST_INODES = 200
_LEAST = {
    "RLIMIT_AS": ("-v", 32 * 1024 * _MIB, "Ray and torch reserve far more addresses than memory"),
    "RLIMIT_FSIZE": ("-f", 1024 * _MIB, "Ray's object store and checkpoints are files"),
    "RLIMIT_NPROC": ("-u", 1_000, "Ray and torch start hundreds of threads"),
    "RLIMIT_NOFILE": ("-n", 512, "Ray holds hundreds of files and sockets open"),
}
"""Limits by name: the option of `ulimit`, below what value it is named, and why."""
_NAMED = {name: least for name, (_, least, _) in _LEAST.items()}
_HOPELESS = {
    "RLIMIT_AS": 4608 * _MIB,  # a sweep stood still with 4 GiB and ended with 5, on two cores
    "RLIMIT_FSIZE": 8 * _MIB,
    "RLIMIT_NPROC": 64,
    "RLIMIT_NOFILE": 64,
}
"""Below what value a local Ray certainly does not come up, but waits until its patience ends."""
_OPEN_FILES = 4096
"""As many files are allowed where that only takes asking."""


class LimitTooSmall(ValueError):
    """Ray cannot come up under a limit of this process."""


def check_limits() -> None:
    """Raise the limit on open files as far as this process may, and refuse what is hopeless.

    Raises:
        LimitTooSmall: A local Ray would certainly not come up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST["RLIMIT_NOFILE"][1]:
        allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if found := [*_place_unusable(TEMPORARY), *_limits(_HOPELESS)]:
        raise LimitTooSmall("; ".join(found))


def shortages() -> list[str]:
    """Return what there is too little of, each as value, rule and remedy; nothing where all
    suffices.
    """
    places = dict.fromkeys((TEMPORARY, *_chosen_place()))
    return [*(text for place in places for text in _space(place)), *_limits(_NAMED)]


def _chosen_place() -> Iterator[Path]:
    try:
        yield Path(tempfile.gettempdir())
    except FileNotFoundError:  # none can be written to, and of these /tmp is one
        return


def _place_unusable(place: Path) -> Iterator[str]:
    try:
        found = os.statvfs(place)
    except OSError as error:
        yield f"{place} cannot be used ({error.strerror}); temporary files lie there; make it"
        return
    if not os.access(place, os.W_OK | os.X_OK):
        yield (
            f"{place} cannot be written to by user {os.getuid()}; temporary files lie there; "
            f"make it writable (chmod 1777 {place})"
        )
    elif found.f_files and not found.f_favail:
        yield f"{place} has no free inodes; each file takes one; remove files there"
    elif not found.f_bavail:
        yield f"{place} has 0 MiB free; Ray writes its logs there; free some"


def _space(place: Path) -> Iterator[str]:
    if unusable := list(_place_unusable(place)):
        yield from unusable
        return
    found = os.statvfs(place)
    if found.f_files and found.f_favail < _LEAST_INODES:
        yield (
            f"{place} has {found.f_favail} free inodes; each file takes one; remove files there"
        )
    if found.f_bavail * found.f_frsize < _LEAST_SPACE:
        yield (
            f"{place} has {found.f_bavail * found.f_frsize // _MIB} MiB free; Ray writes its logs "
            f"there and needs {_LEAST_SPACE // _MIB} MiB; free some"
        )


def _limits(below: Mapping[str, int]) -> Iterator[str]:
    """Name the limits that are below these values; the remedy is to raise them to what suffices
    everywhere.
    """
    for name, (option, least, why) in _LEAST.items():
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft == resource.RLIM_INFINITY or soft >= below[name]:
            continue
        # root is held to no number of processes
        if name == "RLIMIT_NPROC" and os.geteuid() == 0:
            continue
        counted = name in ("RLIMIT_NPROC", "RLIMIT_NOFILE")
        value = str(soft) if counted else f"{soft // _MIB} MiB"
        needed = str(least) if counted else f"{least // _MIB} MiB"
        remedy = f"raise it to {needed} or more, or with: ulimit {option} unlimited"
        if counted:
            remedy = f"raise it with: ulimit {option} {needed}"
        yield f"ulimit {option} is {value}; {why}; {remedy}"
