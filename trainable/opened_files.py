"""Record the files in a task's directory that the task opens while it is built, with digests.

A task that loads `base.pt` from its module's directory depends on that file as on its code. Python
calls an audit hook for each file that it opens. Files that a compiled library opens (safetensors,
HDF5) cause no audit event; the task must name them with `Task.reads`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainable.fingerprint import FOREIGN, OPENED, task_directory

_FILES = 256
"""The most files that are compared; a change of others may show in the data set's items."""
_BLOCK, _BLOCKS = 1 << 20, 64
"""Block size in bytes, and the most blocks of a file that are compared, evenly spread."""


class _Opened:
    """The paths that one thread has opened: for reading only, and for writing."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()


_thread = threading.local()


@contextmanager
def opened_files(task: str) -> Iterator[dict[str, str]]:
    """Record the files in a task's directory that this thread reads inside the context.

    Python's sources, hidden files and installed packages are left out. Files that are also written
    inside the context, such as a log or a new cache, are left out, too.

    Args:
        task: Its name in a spec; its module must be imported before the context ends.

    Yields:
        A dict that is filled when the context ends: a digest of each file, by a key with its path
        relative to the task's directory.
    """
    _install()
    opened, found = _Opened(), dict[str, str]()
    before = getattr(_thread, "opened", None)
    _thread.opened = opened
    try:
        yield found
    finally:
        _thread.opened = before
    directory = task_directory(task)
    if directory is None:
        return
    names = {name for path in opened.read - opened.written if (name := _below(directory, path))}
    for name in sorted(names)[:_FILES]:
        try:
            found[f"{OPENED} {name}"] = _digest(directory / name)
        except OSError:  # removed since, or not a regular file
            continue


@functools.cache
def _install() -> None:
    sys.addaudithook(_audit)  # an audit hook cannot be removed


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open":
        return
    opened = getattr(_thread, "opened", None)
    if opened is None:
        return
    path, _, flags = arguments
    if isinstance(path, str | bytes | os.PathLike):  # else a file descriptor
        writes = isinstance(flags, int) and flags & os.O_ACCMODE != os.O_RDONLY
        (opened.written if writes else opened.read).add(os.path.abspath(os.fsdecode(path)))


def _below(directory: Path, path: str) -> str | None:
    """Return a file's path relative to the directory; None if it is outside or left out."""
    for one in (Path(path), Path(os.path.realpath(path))):
        if one.is_relative_to(directory):
            name = one.relative_to(directory)
            kept = one.is_file() and one.suffix not in (".py", ".pyc")
            hidden = any(part.startswith(".") or part in FOREIGN for part in name.parts)
            return str(name) if kept and not hidden else None
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        count = -(-size // _BLOCK)
        for index in range(min(count, _BLOCKS)):
            if count > _BLOCKS:
                file.seek((size - _BLOCK) * index // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()
