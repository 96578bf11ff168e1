"""TrialLog: a file for a trial's output, written by lines, without secrets or control characters.

What must not live here: what counts as a secret (`redaction`), and who prints.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import io
import os
import re
import stat
import threading
from collections.abc import Sequence
from typing import Any

from redaction.escapes import visible
from redaction.secrets import redact
from trainable.store.regular_files import UNLIMITED, open_regular

TRIAL_LOG = "trial.log"
"""The file in a trial's directory with the trial's output."""
RANK_LOGS = "trial.rank*.log"
"""The files with the output of the trial's further ranks, as a pattern."""
MOST_LOG_BYTES = 10 << 20
_HEAD, _TAIL = 2 << 20, 4 << 20
_PIECE = 1 << 20
_CUT = re.compile(rb"\n\[about (\d+) bytes were cut here")

MOST_COPIED_BYTES = 1 << 20
"""The most bytes that are copied at a time of what was written to a descriptor."""
_WORKER_NAMES = re.compile(rb"^:(actor_name|job_id|task_name):.*\n", re.MULTILINE)
"""The lines by which Ray notes in the file whose output follows."""
LONGEST_LINE = 2 << 20
"""The most characters of an incomplete line that are kept in memory."""
_KEPT_BACK = 8 << 10
"""Characters at the end of a longer line that are not written yet: a secret may begin there."""


def rank_log(rank: int) -> str:
    """Return the name of the file with the output of a further rank of a trial."""
    return RANK_LOGS.replace("*", str(rank))


class DescriptorOutput:
    """Copies to a trial's log what was written to descriptors 1 and 2 below Python.

    Code in C, `os.write` and child processes write there. In a worker both are files of Ray, which
    are removed with the driver and hold nothing of an earlier trial's beyond their present end:
    what follows is the trial's. A descriptor that is no file is left alone.
    """

    def __init__(self, numbers: Sequence[int] = (1, 2)) -> None:
        self._ends: dict[int, os.stat_result] = {}
        for number in numbers:
            with contextlib.suppress(OSError):  # it is closed
                found = os.fstat(number)
                if stat.S_ISREG(found.st_mode):
                    self._ends[number] = found

    def copy_to(self, log: TrialLog) -> None:
        """Write to a log what has come since the last call, its last line completed.

        Of more than `MOST_COPIED_BYTES`, the last of them; a line says how many are left out.
        """
        ctypes.CDLL(None).fflush(None)  # what C code has printed
        for number, before in list(self._ends.items()):
            with contextlib.suppress(OSError):  # the trial has closed it, or the file is gone
                now = os.fstat(number)
                if not os.path.samestat(before, now) or now.st_size <= before.st_size:
                    continue  # the trial has redirected it, or nothing was written
                self._ends[number] = now
                start = max(before.st_size, now.st_size - MOST_COPIED_BYTES)
                with open(f"/proc/self/fd/{number}", "rb") as file:
                    file.seek(start)
                    data = file.read(now.st_size - start)
                if left_out := start - before.st_size:
                    log.write(f"[{left_out} bytes to descriptor {number} are left out here]\n")
                log.buffer.write(_WORKER_NAMES.sub(b"", data))
                if not data.endswith(b"\n"):
                    log.write("\n")


class TrialLog(io.TextIOWrapper):
    """A text file in UTF-8. Beyond `MOST_LOG_BYTES`, only its beginning and its end are kept.

    A line is written without its secrets as soon as it is complete, whether it came as text or as
    bytes through `buffer`. Closing the log writes an incomplete line. A carriage return ends a
    line, too, so that each state of a progress bar is kept. If the disk is full, text is lost, and
    the trial continues. A program that writes to `fileno()` bypasses all this. What is written to
    descriptors 1 and 2 is copied by `DescriptorOutput`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        super().__init__(
            _Lines(path),  # has the methods that TextIOWrapper uses
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )

    def reopened(self) -> TrialLog:
        """Return a new log for the same file, after this one was closed."""
        return TrialLog(self._path)


class _Lines(io.RawIOBase):
    """Receives bytes and writes complete lines."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        if path == os.devnull:  # used when a log cannot be created
            number = os.open(path, flags)
        else:
            number = open_regular(path, flags, limit=UNLIMITED)  # a log beyond its limit is cut
        self._file = os.fdopen(number, "ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        self.name = os.fspath(path)  # TextIOWrapper.name returns the name of its buffer
        self._begin()

    def _begin(self) -> None:
        self._owner, self._lock = os.getpid(), threading.RLock()
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._line: list[str] = []
        self._length = 0

    def _in_this_process(self) -> threading.RLock:
        if self._owner != os.getpid():  # a fork: the line and the lock belong to the parent
            self._begin()
            self._forked = True
        return self._lock

    _forked = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any, /) -> int:
        with self._in_this_process():
            text = self._decoder.decode(bytes(data))
            self._line.append(text)
            self._length += len(text)
            if "\n" in text or "\r" in text or self._length > LONGEST_LINE:
                self._write_lines()
        return len(data)

    def flush(self) -> None:
        """In a forked process, which may never close the log, write the incomplete line."""
        if not self.closed:
            with self._in_this_process():
                if self._forked:
                    self._write_rest()

    def close(self) -> None:
        if not self.closed:
            with self._in_this_process():
                self._write_rest()
                super().close()
                with contextlib.suppress(OSError):
                    self._file.close()

    def _write_lines(self) -> None:
        text = "".join(self._line)
        # A carriage return at the end may be the first half of a line break.
        end = max(text.rfind("\n"), text.rfind("\r", 0, -1)) + 1
        lines, rest = text[:end], text[end:]
        if len(rest) > LONGEST_LINE:
            rest = redact(rest)
            lines, rest = redact(lines) + rest[:-_KEPT_BACK], rest[-_KEPT_BACK:]
        self._line, self._length = [rest], len(rest)
        self._write(lines)

    def _write_rest(self) -> None:
        text = "".join([*self._line, self._decoder.decode(b"", final=True)])
        self._line, self._length = [], 0
        self._write(text)

    def _write(self, text: str) -> None:
        data = memoryview(visible(redact(text)).encode())
        with contextlib.suppress(OSError):
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                while piece:
                    piece = piece[self._file.write(piece) :]
                self._size += len(data[start : start + _PIECE])
                if self._size > MOST_LOG_BYTES:
                    self._cut()

    def _cut(self) -> None:
        number = self._file.fileno()
        size = os.fstat(number).st_size
        if size > MOST_LOG_BYTES:  # else a forked process has cut it already
            with os.fdopen(open_regular(self._path, limit=UNLIMITED), "rb") as file:
                file.seek(_HEAD)
                mark = _CUT.match(file.read(200))
                file.seek(size - _TAIL)
                end = file.read()
            cut = size - _HEAD - _TAIL + (int(mark[1]) if mark else 0)
            os.ftruncate(number, _HEAD)
            rule = f"a trial's log keeps its first {_HEAD >> 20} and its last {_TAIL >> 20} MiB"
            os.write(number, f"\n[about {cut} bytes were cut here: {rule}]\n".encode() + end)
        self._size = os.fstat(number).st_size
