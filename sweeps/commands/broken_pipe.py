"""Output that nobody takes: who read it has ended, the terminal is closed, or there never was one.

A sweep goes on without it. Left alone, what is said next would raise in whichever thread says
it, and the one that drains says something first. What must not live here: any text.
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


def outlive_readers() -> None:
    """Let this process go on, silently, without whom its standard output and error are for."""
    sys.stdout = _going_on(sys.stdout, 1)
    sys.stderr = _going_on(sys.stderr, 2)


class OutputClosed(OSError):
    """A file that takes no more of what a command says."""

    def __str__(self) -> str:
        return (
            f"what this command says could not be written ({self.strerror}); the file that it "
            "goes to must have room; free some, or send it elsewhere"
        )


class _Output(io.FileIO):
    """A pipe or a terminal that becomes a hole with its reader; a full file is an error."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            is_file = stat.S_ISREG(os.fstat(self.fileno()).st_mode)
            _let_go(self.fileno())  # what is still in a buffer would be refused again
            if is_file or error.errno not in (errno.EPIPE, errno.EIO):
                raise OutputClosed(error.errno, error.strerror) from None
            return super().write(data)


def _going_on(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:  # it is closed, and what is opened next would get its number
        _let_go(number)
        return open(number, "w", encoding="utf-8", closefd=False)
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(number, "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )


def _let_go(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
