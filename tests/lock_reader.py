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
file = os.open(path, os.O_RDONLY)
os.setuid(user)  # the file was readable for that user
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
    """A process of a user that can only read a file, and holds a read lock on all of it."""
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(path), str(user), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()
