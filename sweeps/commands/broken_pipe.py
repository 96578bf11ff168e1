"""Ignore broken pipes and closed terminals on standard output and error.

A sweep continues without output. Otherwise the next print would raise in any thread, such as the
one that handles a signal. What must not live here: any text.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def ignore_broken_pipes() -> None:
    """Discard output from now on once standard output or error has lost its reader."""
    sys.stdout = _tolerant(sys.stdout, 1)
    sys.stderr = _tolerant(sys.stderr, 2)


class OutputClosed(OSError):
    """The file to which a command's output goes cannot be written."""

    def __str__(self) -> str:
        return (
            f"the output of this command could not be written ({self.strerror}); the file that "
            "receives it needs free space; free some, or redirect the output to another disk"
        )


class _Output(io.FileIO):
    """An output that discards text once its pipe or terminal is closed; a full file raises."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            is_file = stat.S_ISREG(os.fstat(self.fileno()).st_mode)
            _redirect_to_null(self.fileno())  # buffered text would raise the error again
            if is_file or error.errno not in (errno.EPIPE, errno.EIO):
                raise OutputClosed(error.errno, error.strerror) from None
            return super().write(data)


def _tolerant(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:  # closed; otherwise the next opened file would get this descriptor
        _redirect_to_null(number)
        return open(number, "w", encoding="utf-8", closefd=False)
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(number, "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )


def _redirect_to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null != number:
        os.dup2(null, number)
        os.close(null)
