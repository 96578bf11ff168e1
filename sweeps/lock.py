"""One driver per sweep: an advisory file lock whose holder is named.

The kernel drops the lock when its holder dies, however it dies, so a dead holder never needs a
time-out. The file's content says who holds it, or who held it last: the next holder uses that
to clean up after a dead one.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class Holder:
    """Who holds (or last held) a lock."""

    host: str
    pid: int
    started: float
    """Seconds since the epoch."""
    token: str
    """Unique per driver; every process it starts carries it in its environment."""


class SweepHeld(Exception):
    """Another driver holds the sweep."""

    def __init__(self, name: str, holder: Holder | None) -> None:
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        super().__init__(
            f"sweep '{name}' is already being run by {who}; only one driver may run a sweep; "
            f"watch it with: sweep status {name} --watch"
        )
        self.holder = holder


class SweepLock:
    """An exclusive lock on a sweep's directory, held until `release` or the process' end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self.previous: Holder | None = None
        """Who held the lock before; set by `acquire` when that driver never released it."""

    def acquire(self) -> Holder:
        """Take the lock.

        Raises:
            SweepHeld: Another live process holds it.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115  the lock lives as long as the file is open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise SweepHeld(self._path.parent.name, read_holder(self._path)) from None
        self.previous = read_holder(self._path)
        holder = Holder(socket.gethostname(), os.getpid(), time.time(), uuid.uuid4().hex)
        file.truncate(0)
        file.write(json.dumps(asdict(holder)))
        file.flush()
        os.fsync(file.fileno())
        self._file = file
        return holder

    def release(self) -> None:
        """Give the lock up and leave no holder behind."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def read_holder(path: Path) -> Holder | None:
    """The holder written in a lock file; None when it was released or never held."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock at `path`."""
    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
