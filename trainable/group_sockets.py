"""Close the connections of a process group at once.

Gloo closes its sockets when nothing refers to the group any more, and a sharded model refers to it
in many places. Until then the other ranks wait for a rank that has failed.
What must not live here: when a rank leaves (`collectives.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


class GroupSockets:
    """The sockets that this process opens within a `with` block, in which it makes a group."""

    def __init__(self) -> None:
        self._opened: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the sockets that are opened within the context."""
        before = _sockets()
        yield
        self._opened |= _sockets() - before

    def shut_down(self) -> None:
        """Shut the sockets down that are still open; the other ranks notice it at once."""
        for number, inode in self._opened:
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino != inode:
                    continue  # closed since, and the number has been given to another file
                with socket.socket(fileno=os.dup(number)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        # Not for reading: gloo would end this process with an exception.
                        found.shutdown(socket.SHUT_WR)
        self._opened.clear()


def _sockets() -> set[tuple[int, int]]:
    """Return the numbers and inodes of all open sockets; none where the system lists no files."""
    found = set()
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(number)
                if stat.S_ISSOCK(status.st_mode):
                    found.add((number, status.st_ino))
    return found
