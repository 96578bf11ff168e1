"""Which files below a task's directory it opens while it is built, and what is in them.

A task that loads `base.pt` from beside its module depends on it as on its code, named or not.
Python tells an audit hook of each file that is opened; what a compiled library opens by itself
(safetensors, HDF5) is not told, and has to be named with `Task.reads`.
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
"""Looked at of those that are opened; a data set of more is told by its items."""
_BLOCK, _BLOCKS = 1 << 20, 64
"""Of a file that has more than so many blocks, so many are looked at, evenly spread."""


class _Opened:
    """What one thread has opened: paths to be read alone, and those to be written."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()


_noting = threading.local()


@contextmanager
def opened_files(task: str) -> Iterator[dict[str, str]]:
    """Find what this thread opens for reading, below a task's directory, while the context is
    open.

    Left out are Python's sources, hidden files, installed packages, and whatever is written in
    the same context: a log, or a cache that it makes.

    Args:
        task: Its name in a spec; its module is imported when the context is left.

    Yields:
        Filled when the context is left: a digest of each file, by a key with its path from the
        task's directory.
    """
    _install()
    opened, found = _Opened(), dict[str, str]()
    before = getattr(_noting, "opened", None)
    _noting.opened = opened
    try:
        yield found
    finally:
        _noting.opened = before
    directory = task_directory(task)
    if directory is None:
        return
    names = {name for path in opened.read - opened.written if (name := _below(directory, path))}
    for name in sorted(names)[:_FILES]:
        try:
            found[f"{OPENED} {name}"] = _digest(directory / name)
        except OSError:  # gone since, or no regular file
            continue


@functools.cache
def _install() -> None:
    sys.addaudithook(_heard)  # for as long as the process lives: there is no way to take it off


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open":
        return
    opened = getattr(_noting, "opened", None)
    if opened is None:
        return
    path, _, flags = arguments
    if isinstance(path, str | bytes | os.PathLike):  # else a descriptor
        writes = isinstance(flags, int) and flags & os.O_ACCMODE != os.O_RDONLY
        (opened.written if writes else opened.read).add(os.path.abspath(os.fsdecode(path)))


def _below(directory: Path, path: str) -> str | None:
    """Return a file's path from the directory; None where it is not below it, or is left out."""
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
        for place in range(min(count, _BLOCKS)):
            if count > _BLOCKS:
                file.seek((size - _BLOCK) * place // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()
