"""Fencing: a writer of checkpoints that another one has replaced changes nothing there any more.

The one before may be suspended, on another machine, right before a write. In a directory a rename
fences it (`FencedDirectory`), in an object store a token that each generation's name has
(`ObjectFence`). What must not live here: what is written (`local.py`, `objects.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trainable.errors import WriterReplaced
from trainable.store.generations import is_generation
from trainable.store.regular_files import make_directory, sync_directory

REMOVED = "gone-"
"""The first part of the name of what a writer has moved into its directory to remove it."""
_WRITER = ".writing-"


def fenced(address: Path | str) -> WriterReplaced:
    """Return the error for a writer that has been replaced."""
    return WriterReplaced(
        f"another process has taken over {address}, or it was removed; this process has been "
        "replaced and changes nothing there any more; look at the process that resumed the run"
    )


class FencedDirectory:
    """A directory that one writer at a time changes.

    A writer has a directory of its own in it, `.writing-<token>/`. Whatever it adds, removes or
    quarantines is renamed into or out of that directory. The next writer renames the directory
    away before it reads anything. All later renames of the earlier writer fail, even if it was
    suspended for an hour right before one.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def writer_dir(self) -> Path:
        """This writer's temporary directory; missing once the writer is replaced or closed."""
        return self._root / f"{_WRITER}{uuid.uuid4().hex[:12]}"

    def open(self) -> None:
        """Become the only writer: rename the directory of the one before into this one's."""
        make_directory(self._root)
        self.writer_dir.mkdir()
        for other in self._root.glob(f"{_WRITER}*"):
            if other != self.writer_dir:
                taken = self.writer_dir / f"{REMOVED}{other.name}"
                with contextlib.suppress(FileNotFoundError):  # it has just closed by itself
                    other.rename(taken)
                self._remove_stale_writer(taken)
        sync_directory(self._root)
        if not self.writer_dir.is_dir():  # two writers opened at once, and the other one won
            raise fenced(self._root)

    def finish(self, other: Path) -> None:
        """Finish what a replaced writer began in its directory, before that is removed."""

    def close(self) -> None:
        """Stop being the writer."""
        shutil.rmtree(self.writer_dir, ignore_errors=True)  # missing if the writer was replaced

    @contextlib.contextmanager
    def translate_fenced(self) -> Iterator[None]:
        """Raise `WriterReplaced` for a missing-file error that another writer has caused."""
        try:
            yield
        except OSError as problem:
            # NFS raises ESTALE for a file that another host has removed.
            if problem.errno not in (errno.ENOENT, errno.ESTALE) or os.path.isdir(self.writer_dir):
                raise
            raise fenced(self._root) from problem

    def has_writer(self) -> bool:
        """Whether a writer's directory exists: of a running writer, or of one that was killed."""
        return any(self._root.glob(f"{_WRITER}*"))

    def _remove_stale_writer(self, other: Path) -> None:
        if other.exists():
            self.finish(other)
            # A writer that was killed while it replaced a third one still has its directory.
            for nested in other.glob(f"{REMOVED}{_WRITER}*"):
                self._remove_stale_writer(nested)
            remove_tree(other)


def remove_tree(path: Path) -> None:
    """Remove a directory. NFS keeps an `.nfs*` file for each file that a process here has open."""
    try:
        shutil.rmtree(path)
    except OSError as problem:
        if problem.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        shutil.rmtree(path, ignore_errors=True)


class ObjectWriter(NamedTuple):
    """The contents of the object `writer`: who may change the generations.

    Attributes:
        token: A part of the name of each generation that it adds; empty: there is no writer.
        found: The complete generations at the time it opened.
        replaced: The tokens of earlier writers. A generation that one of them commits later is
            invalid.
    """

    token: str = ""
    found: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, content: bytes) -> ObjectWriter:
        token, *lines = content.decode(errors="replace").split("\n")
        found = frozenset(filter(is_generation, lines))
        return cls(token, found, frozenset(lines) - found)

    def to_bytes(self) -> bytes:
        return "\n".join([self.token, *sorted(self.found), *sorted(self.replaced)]).encode()

    def is_valid(self, name: str) -> bool:
        """Whether a generation with a manifest was committed by a writer that was not replaced."""
        return name in self.found or token_of(name) not in self.replaced


class ObjectFence:
    """The object `writer` of a prefix of an object store, which has no renames.

    A writer stores its token in it, with the generations that it found and the writers that it
    replaces. It reads that object again before it writes a manifest. If it is replaced between
    this check and the write, it damages nothing. The names of two writers differ, and the new
    writer treats the late generation as invalid. A writer that is still current keeps all its
    generations, even if another one had begun to open before it.
    """

    def __init__(self, system: Any, key: str, address: str) -> None:
        self._system, self._key, self._address = system, key, address
        self.token = uuid.uuid4().hex[:12]
        self.writer: ObjectWriter | None = None
        """This writer; None before its first `write`."""

    def write(self, writer: ObjectWriter) -> None:
        """Become the writer, or say what this one has found."""
        self.writer = writer
        self._system.pipe_file(self._key, writer.to_bytes())

    def read(self) -> ObjectWriter:
        """Return the last writer that opened and has not closed."""
        try:
            return ObjectWriter.parse(bytes(self._system.cat_file(self._key)))
        except FileNotFoundError:
            return ObjectWriter()

    def check(self) -> None:
        """Raise `WriterReplaced` if another writer has opened the generations."""
        if self.read().token != self.token:
            raise fenced(self._address)


def token_of(name: str) -> str:
    """Return the token of the writer that added a generation; "" if the name has none."""
    return name.partition(".")[0].rpartition("-")[2]
