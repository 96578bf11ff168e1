"""Faults of the storage below one directory, for real processes: what `faults.c` does, in Python.

A `Faults` watches one directory for every process that is started with its `environment`, and for
their children. It records each call that persists something, kills the caller before the call of
a given index, lets calls fail, fills the disk, or shifts Python's wall clock; all of it may be
changed while the processes run. What must not live here: what has to survive, or what is left
after a power loss (`power_loss.py`).
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
NO_COMPILER = "no C compiler (cc) was found; on Debian and Ubuntu: apt-get install gcc libc6-dev"

# The layout of `struct control` and `struct header` in faults.c.
_FIELDS = ["counter", "kill_at", "torn", "fail_from", "fail_until", "error", "kinds", "room",
           "clock_ns", "record"]  # fmt: skip
_TEXTS = {"root": 512, "match": 256, "log": 512}
_CALM = {"counter": 0, "kill_at": -1, "fail_from": -1, "room": -1, "clock_ns": 0}
_HEADER = struct.Struct("<qqqiiiiii")
_FOREVER = 2**62


class Kind(IntEnum):
    """What a call does. The last two persist nothing: they are not counted, but they may fail."""

    CREATE = 0
    WRITE = 1
    SYNC = 2
    RENAME = 3
    UNLINK = 4
    MKDIR = 5
    RMDIR = 6
    TRUNCATE = 7
    OPEN = 8
    ACCESS = 9


# Which calls the kernel refuses with which error.
_REFUSED = {
    errno.ENOSPC: {Kind.CREATE, Kind.WRITE, Kind.MKDIR},
    errno.EROFS: set(Kind) - {Kind.SYNC},
    errno.EACCES: set(Kind) - {Kind.SYNC, Kind.WRITE},
    errno.EIO: {Kind.WRITE, Kind.SYNC},
}


@dataclass(frozen=True)
class Operation:
    """One call, as it was made.

    Attributes:
        index: Counts the calls since the last `clear` or `kill_before`.
        kind: What it does.
        path: Below the watched directory; empty for the directory itself.
        other: Where a rename leads.
        offset: Where a write begins.
        length: Bytes written, or the length to which a file is cut.
        error: Its errno, 0 when it succeeded.
        data: What was written, when contents are recorded.
        pid: Who made it.
    """

    index: int
    kind: Kind
    path: str
    other: str
    offset: int
    length: int
    error: int
    data: bytes
    pid: int

    def __str__(self) -> str:
        size = f" {self.length}" if self.kind in (Kind.WRITE, Kind.TRUNCATE) else ""
        target = f" -> {self.other}" if self.other else ""
        problem = f" {errno.errorcode[self.error]}" if self.error else ""
        return f"{self.index} {self.kind.name.lower()} {self.path}{target}{size}{problem}"


def compile_shim(directory: Path) -> Path:
    """Compile `faults.c` into `directory`.

    Raises:
        FileNotFoundError: There is no C compiler; the message says how to get one.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError(NO_COMPILER)
    shim = directory / "faults.so"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *options, "-o", shim, SOURCE, "-ldl"], check=True)
    return shim


class Faults:
    """The storage below one directory, and what is wrong with it.

    Args:
        shim: What `compile_shim` returned.
        directory: Where the control block and the record lie; outside `root`.
        root: The directory that is watched. It need not exist yet.
    """

    def __init__(self, shim: Path, directory: Path, root: Path) -> None:
        self._shim = shim
        self._control, self._log = directory / "faults.control", directory / "faults.log"
        size = 8 * len(_FIELDS) + sum(_TEXTS.values())
        self._control.write_bytes(bytes(size))
        with self._control.open("r+b") as file:
            self._block = mmap.mmap(file.fileno(), size)
        self._set_text("root", os.path.realpath(root))
        self._set_text("log", str(self._log))
        self.clear()

    @property
    def environment(self) -> dict[str, str]:
        """What puts a process, and all that it starts, under these faults."""
        return {"LD_PRELOAD": str(self._shim), "FAULTS_CONTROL": str(self._control)}

    @property
    def count(self) -> int:
        """Operations since the last `clear` or `kill_before`."""
        return int(struct.unpack_from("<q", self._block, 0)[0])

    def clear(self) -> None:
        """Heal everything, count from 0, and forget the record."""
        self._set(**_CALM, record=0, kinds=0)
        self._set_text("match", "")
        self._log.write_bytes(b"")

    def record(self, *, contents: bool = False, match: str = "") -> None:
        """Record the operations from now on, on paths like `match` (a shell pattern; `*` also
        stands for slashes), with what they write if asked for.
        """
        self.clear()
        self._set_text("match", match)
        self._set(record=2 if contents else 1)

    def operations(self) -> list[Operation]:
        """What was recorded, in the order in which it was done."""
        content, at, found = self._log.read_bytes(), 0, []
        while at < len(content):
            index, offset, length, kind, pid, error, *sizes = _HEADER.unpack_from(content, at)
            at += _HEADER.size
            parts = []
            for size in sizes:
                parts.append(content[at : at + size])
                at += size
            path, other = (os.fsdecode(part) for part in parts[:2])
            found.append(
                Operation(index, Kind(kind), path, other, offset, length, error, parts[2], pid)
            )
        return found

    def kill_before(self, index: int, *, torn: bool = False, match: str = "") -> None:
        """Count from 0 again; SIGKILL whoever comes to the operation of this index: before it, or
        if `torn` in the middle of it when it is a write.
        """
        self._set(counter=0, torn=torn, kill_at=index)
        self._set_text("match", match)

    def fail(
        self, error: int, *, match: str = "", first: int = 0, number: int | None = None
    ) -> None:
        """Count from 0 again; refuse operations, those that the kernel would refuse so.

        Args:
            error: ENOSPC, EROFS, EACCES or EIO.
            match: On which paths.
            first: The index of the first one that fails.
            number: How many fail; all that follow when None.
        """
        kinds = sum(1 << kind for kind in _REFUSED[error])
        until = _FOREVER if number is None else first + number
        self._set_text("match", match)
        self._set(counter=0, error=error, kinds=kinds, fail_until=until, fail_from=first)

    def fill(self, room: int, *, match: str = "") -> None:
        """Let files grow by `room` bytes in all; what goes beyond is cut, then ENOSPC."""
        self._set_text("match", match)
        self._set(counter=0, room=room)

    def shift_clock(self, seconds: int) -> None:
        """Shift the wall clock that Python sees; files keep the kernel's times."""
        self._set(clock_ns=seconds * 10**9)

    @staticmethod
    def count_here() -> int:
        """The same as `count`, for a process that is under these faults; 0 for any other."""
        control = os.environ.get("FAULTS_CONTROL")
        if control is None:
            return 0
        with open(control, "rb") as file:
            return int.from_bytes(file.read(8), "little")

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            struct.pack_into("<q", self._block, 8 * _FIELDS.index(name), value)

    def _set_text(self, name: str, text: str) -> None:
        at = 8 * len(_FIELDS)
        for field, size in _TEXTS.items():
            if field == name:
                content = os.fsencode(text)
                assert len(content) < size, f"{name} is too long: {text}"
                self._block[at : at + size] = content.ljust(size, b"\0")
            at += size
