"""What this machine gives a process too little of: temporary space, inodes, resource limits.

What must not live here: free space of the sweep's own directory (`commands/doctor`), and memory.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
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


def shortages() -> list[str]:
    """Return what there is too little of, each as value, rule and remedy; nothing where all
    suffices.
    """
    places = dict.fromkeys((TEMPORARY, *_chosen_place()))
    return [*(text for place in places for text in _space(place)), *_limits()]


def _chosen_place() -> Iterator[Path]:
    try:
        yield Path(tempfile.gettempdir())
    except FileNotFoundError:  # none can be written to, and of these /tmp is one
        return


def _space(place: Path) -> Iterator[str]:
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
    if found.f_files and found.f_favail < _LEAST_INODES:
        yield (
            f"{place} has {found.f_favail or 'no'} free inodes; each file takes one; remove files "
            "there"
        )
    if found.f_bavail * found.f_frsize < _LEAST_SPACE:
        yield (
            f"{place} has {found.f_bavail * found.f_frsize // _MIB} MiB free; Ray writes its logs "
            f"there and needs {_LEAST_SPACE // _MIB} MiB; free some"
        )


def _limits() -> Iterator[str]:
    for name, (option, least, why) in _LEAST.items():
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft == resource.RLIM_INFINITY or soft >= least:
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
