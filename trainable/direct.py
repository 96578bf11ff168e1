"""A file that is written past the operating system's cache, where the file system can do that.

A state is written once and hardly ever read, and copying it into the cache takes bandwidth of the
memory from the training beside it. What must not live here: what is written, and when.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Self

# Such writes begin and end at a block's boundary, in memory and in the file; a page is a multiple
# of every block.
_PIECE = 2**20
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux alone has it


class DirectFile:
    """A new file, written from its start to its end; a context manager that closes it.

    Args:
        path: Where; nothing may be there.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        self._buffer = mmap.mmap(-1, _PIECE)  # starts at a page
        self._filled = 0
        self._is_direct = False
        with contextlib.suppress(OSError):  # the cache is used then
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags | _DIRECT)
            self._is_direct = bool(_DIRECT)

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes; they are in the file for certain only after `sync`."""
        whole = rest = memoryview(content).cast("B")
        while rest:
            part = rest[: _PIECE - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == _PIECE:
                self._empty()
        return len(whole)

    def flush(self) -> None:
        """Do nothing: the rest, which fills no block, is written by `sync`."""

    def sync(self) -> None:
        """Write the rest, and wait until everything is on the disk. Nothing can follow."""
        self._use_cache()
        self._empty()
        os.fsync(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._buffer.close()
        os.close(self._descriptor)

    def _empty(self) -> None:
        with memoryview(self._buffer) as whole, whole[: self._filled] as filled:
            written = 0
            while written < self._filled:
                with filled[written:] as rest:
                    try:
                        written += os.write(self._descriptor, rest)
                    except OSError as error:
                        # Some file systems say only now that they cannot; and a disk that is
                        # nearly full may have taken part of a block.
                        if error.errno != errno.EINVAL or not self._is_direct:
                            raise
                        self._use_cache()
        self._filled = 0

    def _use_cache(self) -> None:
        if self._is_direct:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags)
            self._is_direct = False
