"""Lock a sweep for one driver, by an advisory lock on a file that names its holder.

The kernel releases the lock when its holder dies, so a dead holder needs no time-out, and a
stopped one keeps it. On a shared file system such as NFS, other hosts see the lock. The file names
the current or last holder, so that the next driver can clean up after a dead one. A driver whose
lock file was removed or replaced has lost the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from sweeps.errors import LockLost, LockTaken, SweepLockedError
from sweeps.paths import command_line
from tracking.lock_holders import lock_holders, user_name
from trainable.store.regular_files import LARGEST_NOTE, make_directory, open_regular, read_regular

_READER_SECONDS = 1.0
"""How long `acquire` waits for processes that lock the file only to test it."""
_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class LockOwner:
    """The driver that holds a lock, or held it last."""

    host: str
    pid: int
    started: float
    """Seconds since the epoch."""
    token: str
    """Unique per driver; tags every process that the driver starts."""

    def describe(self) -> str:
        """Return process and host: `process 4711 on gpu-3`."""
        return f"process {self.pid} on {self.host}"

    @property
    def since(self) -> str:
        """When it acquired the lock, in local time: `2026-11-20 17:20:11`."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))


def lock_lost(what: str, directory: Path) -> LockLost:
    """Return the error of a driver that has lost the lock."""
    return LockLost(
        f"{what}; only the lock's holder may write to a sweep, so this driver exited without "
        "writing; see which process runs it with: "
        f"{command_line(directory.parent, 'status', directory.name)}"
    )


def sweep_locked(directory: Path, holder: LockOwner | None) -> SweepLockedError:
    """Return the error that another driver holds the sweep in a directory."""
    who = holder.describe() if holder else "another process"
    since = f", this one since {holder.since}" if holder else ""
    watch = command_line(directory.parent, "status", directory.name, "--watch")
    message = (
        f"sweep '{directory.name}' is already being run by {who}; only one driver may run a "
        f"sweep{since}; watch it with: {watch}"
    )
    return SweepLockedError(message, holder)


class SweepLock:
    """An exclusive lock on a sweep's directory, held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._exiting = False
        self.previous: LockOwner | None = None
        """The last holder, if that driver died without releasing the lock; set by `acquire`."""
        self.token = ""
        """The token that tags this driver's processes; set by `acquire`."""

    def acquire(self) -> LockOwner:
        """Acquire the lock."""
        holder = LockOwner(socket.gethostname(), os.getpid(), time.time(), uuid.uuid4().hex)
        file = self._lock_file()
        # Processes with this token will be killed, so a token in another user's file is ignored.
        if os.fstat(file.fileno()).st_uid == os.geteuid():
            self.previous = read_holder(self._path)
        file.truncate(0)
        file.write(json.dumps(asdict(holder)))
        file.flush()
        os.fsync(file.fileno())
        self.token = holder.token
        return holder

    def _lock_file(self) -> IO[str]:
        make_directory(self._path.parent)
        while True:
            # The lock is held while the file is open; no other process writes to the file.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            number = open_regular(self._path, flags, limit=LARGEST_NOTE, mode=0o600)
            file = os.fdopen(number, "a+", encoding="utf-8")
            if not _try_lock(file, self._path):
                file.close()
                if (stranger := describe_foreign_lock(self._path)) is not None:
                    raise LockTaken(stranger)
                raise sweep_locked(self._path.parent, _read_live_holder(self._path))
            if os.fstat(number).st_uid == os.geteuid():
                # A user who can open the file can lock it; a copy may have made it readable.
                os.fchmod(number, 0o600)
            self._file = file
            if self.is_ours():
                return file
            file.close()  # the file was removed between opening and locking it

    def check(self) -> None:
        """Check, by a `stat`, that this process still holds the lock; any thread may call it."""
        if self._exiting:
            threading.Event().wait()  # until this process ends
        if not self.is_ours():
            raise lock_lost(
                f"the lock {self._path} was removed or replaced under this driver",
                self._path.parent,
            )

    def block_writers(self) -> None:
        """Block writers while the process exits, in `check`, so that no write ends half-way."""
        self._exiting = True

    def is_ours(self) -> bool:
        """Return whether the locked file is still at its path; the sweep is then this driver's."""
        assert self._file is not None, "acquire comes first"
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # removed here, or by another host
                return False
            raise

    def release(self) -> None:
        """Release the lock, and remove the holder from the file."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _try_lock(file: IO[str], path: Path) -> bool:
    """Lock a file unless a driver holds it; wait for processes that only test the lock."""
    deadline = time.monotonic() + _READER_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_held(path) or time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        else:
            return True


def read_holder(path: Path) -> LockOwner | None:
    """Return the holder named in a lock file."""
    try:
        holder = LockOwner(**json.loads(read_regular(path, LARGEST_NOTE)))
    except (FileNotFoundError, PermissionError, ValueError, TypeError, RecursionError):
        return None
    # A shorter token would match the processes of other drivers, an empty one all processes.
    return holder if _TOKEN.fullmatch(str(holder.token)) else None


def _read_live_holder(path: Path) -> LockOwner | None:
    """Return the holder, who locks the file a moment before it writes its name."""
    for _ in range(20):
        if (holder := read_holder(path)) is not None:
            return holder
        time.sleep(0.05)
    return None


def is_held(path: Path) -> bool:
    """Return whether a live driver holds the lock at `path`.

    Of another user's lock, only holders on this machine are known.
    """
    try:
        file = open_regular(path, limit=LARGEST_NOTE)
    except FileNotFoundError:
        return False
    except PermissionError:
        return (
            any(one.exclusive for one in lock_holders(path, "FLOCK"))
            and _foreign_holder(path) is None
        )
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _foreign_holder(path) is None
    finally:
        os.close(file)
    return False


def describe_foreign_lock(path: Path) -> str | None:
    """Return a message about a process of this machine that has locked the file and is no driver.

    Such a process belongs neither to the file's owner nor to root. None if there is none.
    """
    if (found := _foreign_holder(path)) is None:
        return None
    pid, user = found
    return (
        f"{path} is locked by process {pid} of user {user}, which is not a driver; only the "
        "owner of a lock file runs its sweep; if no driver runs it, remove the file: "
        f"{shlex.join(('rm', str(path)))}"
    )


def _foreign_holder(path: Path) -> tuple[int, str] | None:
    """Return the id and user of a process that `describe_foreign_lock` is about."""
    try:
        trusted = {0, os.stat(path, follow_symlinks=False).st_uid}
    except OSError:
        return None
    for one in lock_holders(path, "FLOCK"):
        user = one.user  # None: it has ended; a child process may still hold the lock
        if user is not None and user not in trusted:
            return one.pid, user_name(user)
    return None
