"""One driver per sweep: an advisory file lock whose holder is named.

The kernel drops the lock when its holder dies, however it dies, so a dead holder never needs a
time-out, and a stopped one keeps it. On a shared path the file system carries the lock between
hosts, as NFS does. The file's content says who holds it, or who held it last: the next holder uses
that to clean up after a dead one. A holder whose file was removed or replaced is one no longer.
Where the ledger lies outside of the directory, its own lock is taken beside (`database_lock`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import re
import shlex
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from sweeps.errors import LockLost, LockTaken, SweepLockedError
from sweeps.paths import command_line
from trainable.storage.durable import make_directory
from trainable.storage.regular_files import LARGEST_NOTE, open_regular, read_regular

_LOOKING_SECONDS = 1.0
"""For how long those who only look are waited for."""
_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class LockOwner:
    """Who holds (or last held) a lock."""

    host: str
    pid: int
    started: float
    """Seconds since the epoch."""
    token: str
    """Unique per driver; every process it starts carries it in its environment."""

    def describe(self) -> str:
        """Say who it is: `process 4711 on gpu-3`."""
        return f"process {self.pid} on {self.host}"

    @property
    def since(self) -> str:
        """When it took the lock, by this machine's clock: `2026-11-20 17:20:11`."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))


class SecondaryLock(Protocol):
    """A further lock on a sweep, taken and given up with the directory's."""

    def acquire(self, holder: LockOwner) -> None:
        """Take it; raises `SweepLockedError` when another driver holds it."""

    def check(self) -> None:
        """Raise `LockLost` when it is no longer this driver's."""

    def release(self) -> None:
        """Give it up."""


def lock_lost(what: str, directory: Path) -> LockLost:
    """Return the error of a driver that no longer holds the lock.

    Args:
        what: What happened to the lock.
        directory: The sweep's.
    """
    return LockLost(
        f"{what}; only its holder may write to a sweep; this driver left without writing; see "
        f"who runs it with: {command_line(directory.parent, 'status', directory.name)}"
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
    """An exclusive lock on a sweep's directory, held until `release` or the process' end.

    Args:
        path: Its file.
        beside: What else must be held.
    """

    def __init__(self, path: Path, beside: SecondaryLock | None = None) -> None:
        self._path = path
        self._beside = beside
        self._file: IO[str] | None = None
        self._asking = threading.Lock()  # whoever leaves at once does not wait for it
        self._leaves = False
        self.previous: LockOwner | None = None
        """Who held the lock before; set by `acquire` when that driver never released it."""
        self.token = ""
        """The token of this driver, by which its processes are found; set by `acquire`."""

    def acquire(self) -> LockOwner:
        """Take the lock.

        Raises:
            SweepHeld: Another live process holds it.
            LockTaken: A process that is no driver of its owner's has locked the file.
            IrregularFile: The lock is no regular file.
            LedgerError: The ledger's lock cannot be asked for.
        """
        holder = LockOwner(socket.gethostname(), os.getpid(), time.time(), uuid.uuid4().hex)
        if self._beside is not None:  # first: who is refused there has made nothing here
            self._beside.acquire(holder)
        try:
            file = self._lock_file()
        except BaseException:  # an interruption, too, gives both back or none; raised again
            if self._beside is not None:
                self._beside.release()
            raise
        # Processes end by a previous holder's token: another user's file names none of ours.
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
            # For as long as the file is open, the lock is held; nobody else writes to it.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            number = open_regular(self._path, flags, limit=LARGEST_NOTE, mode=0o600)
            file = os.fdopen(number, "a+", encoding="utf-8")
            if not _take(file, self._path):
                file.close()
                if (stranger := locked_by_a_stranger(self._path)) is not None:
                    raise LockTaken(stranger)
                raise sweep_locked(self._path.parent, _read_live_holder(self._path))
            if os.fstat(number).st_uid == os.geteuid():
                # Who can open it can lock it: those of earlier releases everybody could read.
                os.fchmod(number, 0o600)
            self._file = file
            if self.is_ours():
                return file
            file.close()  # removed between opening and locking it: this is nobody's lock

    def check(self) -> None:
        """Make sure that the lock is still this process'; costs one look at the file's inode, and
        what the lock beside it asks. May be called from any thread.

        Raises:
            LockLost: It is not; nothing may be written to the sweep any more.
            LedgerError: The lock beside it cannot be asked.
        """
        if self._leaves:
            threading.Event().wait()  # for the end of this process
        if not self.is_ours():
            raise lock_lost(
                f"the lock {self._path} was removed or replaced under this driver",
                self._path.parent,
            )
        if self._beside is not None:
            with self._asking:
                self._beside.check()

    def block_writers(self) -> None:
        """Have everybody wait who is about to write, because this process ends right now: it would
        end in the middle of that.
        """
        self._leaves = True

    def is_ours(self) -> bool:
        """Whether the file that was locked is still the one in its place: then what lies in the
        directory is this process'.
        """
        assert self._file is not None, "acquire comes first"
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # removed here, or by another host
                return False
            raise

    def release(self) -> None:
        """Give the lock up and leave no holder behind."""
        self.release_local()
        if self._beside is not None:
            self._beside.release()

    def release_local(self) -> None:
        """Give the directory's lock up; the one beside it goes with this process, which ends right
        now and may be in the middle of a question to it.
        """
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _take(file: IO[str], path: Path) -> bool:
    """Lock a file, unless a driver has it. Whoever looks has it, too, and for a moment only."""
    deadline = time.monotonic() + _LOOKING_SECONDS
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
    """The holder written in a lock file; None when it was released, never held, is damaged, or is
    another user's.

    Raises:
        IrregularFile: It is no regular file.
    """
    try:
        holder = LockOwner(**json.loads(read_regular(path, LARGEST_NOTE)))
    except (FileNotFoundError, PermissionError, ValueError, TypeError, RecursionError):
        return None
    # A shorter token would mean the processes of many drivers, an empty one all of a user's.
    return holder if _TOKEN.fullmatch(str(holder.token)) else None


def _read_live_holder(path: Path) -> LockOwner | None:
    """The holder, who between locking the file and writing into it may take a moment."""
    for _ in range(20):
        if (holder := read_holder(path)) is not None:
            return holder
        time.sleep(0.05)
    return None


def is_held(path: Path) -> bool:
    """Whether a live driver holds the lock at `path`; of another user's lock only what this
    machine's kernel knows of it.

    Raises:
        IrregularFile: It is no regular file.
    """
    try:
        file = open_regular(path, limit=LARGEST_NOTE)
    except FileNotFoundError:
        return False
    except PermissionError:
        return any(exclusive for _, exclusive in _lockers(path)) and _stranger(path) is None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _stranger(path) is None
    finally:
        os.close(file)
    return False


def locked_by_a_stranger(path: Path) -> str | None:
    """Return a sentence about a process that has locked the file and cannot be a driver, for it is
    neither the file's owner's nor root's; None: there is none, as far as this machine knows.
    """
    if (found := _stranger(path)) is None:
        return None
    pid, user = found
    return (
        f"{path} is locked by process {pid} of user {user}, which is no driver: a sweep is run by "
        f"who owns its lock; what nobody runs goes on with a new lock: "
        f"{shlex.join(('rm', str(path)))}"
    )


def _stranger(path: Path) -> tuple[int, str] | None:
    """The process id and the user of who has locked a file and is neither its owner nor root."""
    try:
        trusted = {0, os.stat(path, follow_symlinks=False).st_uid}
    except OSError:
        return None
    for pid, _ in _lockers(path):
        try:
            user = os.stat(f"/proc/{pid}").st_uid
        except OSError:  # it has ended; a child that has the file may hold the lock still
            continue
        if user not in trusted:
            return pid, _name(user)
    return None


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _lockers(path: Path) -> list[tuple[int, bool]]:
    """The processes of this machine that have locked a file, and whether they exclude others; the
    kernel tells it everybody who can see the file's directory.
    """
    try:
        found = os.stat(path, follow_symlinks=False)
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    fields = (line.split() for line in lines if " FLOCK " in line and " -> " not in line)
    return [(int(each[4]), each[3] == "WRITE") for each in fields if each[5] == wanted]
