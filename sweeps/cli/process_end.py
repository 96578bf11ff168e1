"""End the process: without output that nobody reads, and in a time that is known.

A sweep continues after its pipe or its terminal has closed. Otherwise the next print would raise
in any thread, such as the one that handles a signal. What must not live here: what is printed.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

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


_SECONDS = 5.0
"""How long what a task left may take."""


def limit_exit(err: Console, code: int) -> None:
    """Exit after some seconds, with the reason, if Python has not exited until then."""

    def end() -> None:
        time.sleep(_SECONDS)
        try:
            children = multiprocessing.active_children()
            with suppress(OSError):  # standard error may be a file on a full disk
                err.print(_sentence(children), style="yellow", soft_wrap=True)
            for child in children:
                child.kill()
        finally:
            os._exit(code)

    threading.Thread(target=end, name="exit", daemon=True).start()


def _sentence(children: Sequence[BaseProcess]) -> str:
    threads = [
        f"thread {each.name!r}"
        for each in threading.enumerate()
        if not each.daemon and each is not threading.main_thread()
    ]
    processes = [f"process {each.pid}" for each in children if not each.daemon]
    found = ", ".join([*threads, *processes]) or "a function of atexit"
    return (
        f"the task left {found} running; a command waits {_SECONDS:g} s for that and then ends "
        "it; let the task end what it starts, or start threads and processes with daemon=True"
    )
