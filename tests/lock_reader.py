"""A process of a user who can only read a file, and locks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534
"""A user without permissions, where a test runs as root."""
LOCK = """
import fcntl, os, struct, sys
path, user, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.chdir(os.path.dirname(path))  # whoever may enter the directories above this one
if user != os.geteuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
try:
    file = os.open(os.path.basename(path), os.O_RDONLY)
except PermissionError:
    sys.exit("denied")
if kind == "OFD":
    lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
else:
    fcntl.lockf(file, fcntl.LOCK_SH)
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def reader(path: Path, user: int, kind: str = "POSIX") -> Iterator[int]:
    """A process of a user that can only read a file, and holds a read lock on all of it.

    Args:
        path: The file. That user may enter its directory.
        user: The user's id; not this process' own only as root.
        kind: `POSIX`, or `OFD` for a lock of the open file.
    """
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(path), str(user), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "locked\n":
            raise PermissionError(f"user {user} cannot open {path}")
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()
