"""Output that nobody takes any more: who read it has ended, or the terminal is closed.

A sweep goes on without it. Left alone, what is said next would raise in whichever thread says
it, and the one that drains says something first. What must not live here: any text.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def outlive_readers() -> None:
    """Let this process go on, silently, when its standard output or error cannot be written."""
    sys.stdout = _going_on(sys.stdout)
    sys.stderr = _going_on(sys.stderr)


class _Output(io.FileIO):
    """A pipe or a terminal whose first refusal makes it a hole; a file's is an error."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            if stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def _going_on(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # closed from the start, or a test's own
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )
