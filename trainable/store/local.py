"""LocalFiles: checkpoints in a directory of a local or network file system, committed by a rename.

What must not live here: what all storages share (`generations.py`), and which storage a run has
(`objects.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self, TypeVar

from trainable.store.fencing import REMOVED, FencedDirectory, remove_tree
from trainable.store.generations import (
    MANIFEST,
    MISSING,
    STATE,
    Write,
    WriteShard,
    has_tensors,
    is_generation,
    quarantined,
    reading,
    unused_name,
)
from trainable.store.regular_files import (
    LARGEST_NOTE,
    UNLIMITED,
    IrregularFile,
    read_regular,
    sync_directory,
    sync_open_file,
)

_NEW, _DAMAGED = "new-", "damaged-"
_NO_LINKS = {errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV}

_T = TypeVar("_T")


class LocalFiles(FencedDirectory):
    """Generations in a directory, committed by a rename from or into that of the writer."""

    remedy = "free space, correct the permissions, or check that the disk responds"

    @classmethod
    def of(cls, run: Path) -> Self:
        """Return the generations of the run in a directory."""
        return cls(run / "checkpoints")

    def at(self, address: str) -> LocalFiles:
        return LocalFiles(Path(address))

    def address(self, name: str) -> str:
        return str(self._root / name)

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError), reading(self):
            return sorted(filter(is_generation, os.listdir(self._root)))
        return []

    def unused(self, step: int) -> str:
        return unused_name(f"step-{step:08d}", self.names())

    def damaged(self) -> list[str]:
        directory = self._root / quarantined()
        return sorted(quarantined(path.name) for path in directory.glob("*"))

    def read(self, name: str, file: str) -> bytes:
        with reading(self, f"{name}/{file}"):
            return _retry_once(_content, f"{self._root}/{name}/{file}")

    def length(self, name: str, file: str) -> int:
        with reading(self, f"{name}/{file}"):
            return _retry_once(os.path.getsize, f"{self._root}/{name}/{file}")

    def begin(self, name: str) -> str:
        aside = self.writer_dir / f"{_NEW}{name}"
        with self.translate_fenced():
            aside.mkdir()
        return str(aside)

    def add_shard(self, begun: str, file: str, write: WriteShard) -> None:
        with (Path(begun) / file).open("xb") as shard:
            write(shard)
            sync_open_file(shard)

    def commit(self, name: str, write: Write) -> None:
        aside = self.writer_dir / f"{_NEW}{name}"
        with self.translate_fenced():
            aside.mkdir(exist_ok=True)  # `begin` makes it, too
            try:
                with (aside / STATE).open("xb") as file:
                    manifest = write(file)
                    sync_open_file(file)
                with (aside / MANIFEST).open("xb") as file:
                    file.write(manifest)
                    sync_open_file(file)
            except BaseException:  # remove the partial state, or a full disk stays full
                shutil.rmtree(aside, ignore_errors=True)
                raise
            sync_directory(aside)
            self.rename(aside, self._root / name)
            sync_directory(self._root)

    def link(self, generation: Path, name: str, files: Iterable[str]) -> None:
        """Add another run's generation, as hard links or a copy; it outlives the original."""
        aside = self.writer_dir / f"{_NEW}{name}"
        with self.translate_fenced():
            aside.mkdir()
            for file in files:
                _link(generation / file, aside / file)
            sync_directory(aside)
            self.rename(aside, self._root / name)
            sync_directory(self._root)

    def remove(self, name: str) -> None:
        aside = self.writer_dir / f"{REMOVED}{name}"
        with self.translate_fenced():
            self.rename(self._root / name, aside)
            remove_tree(aside)

    def quarantine(self, name: str) -> None:
        aside = self.writer_dir / f"{_DAMAGED}{name}"
        with self.translate_fenced():
            self.rename(self._root / name, aside)
            self._move_to_quarantine(aside)

    def replace(self, path: Path, content: bytes) -> None:
        """Replace another file of the run, atomically and durably."""
        aside = self.writer_dir / path.name
        with self.translate_fenced():
            with aside.open("wb") as file:
                file.write(content)
                sync_open_file(file)
            self.rename(aside, path)
            sync_directory(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        """Move within the run's file system, atomically."""
        source.rename(target)

    def finish(self, other: Path) -> None:
        for aside in other.glob(f"{_DAMAGED}*"):
            self._move_to_quarantine(aside)

    def _move_to_quarantine(self, aside: Path) -> None:
        directory = self._root / quarantined()
        # Synced only after the rename: a power loss in between must not lose the generation.
        directory.mkdir(exist_ok=True)
        name = unused_name(aside.name.removeprefix(_DAMAGED), os.listdir(directory))
        self.rename(aside, directory / name)
        sync_directory(directory)
        sync_directory(self._root)


def _retry_once(read: Callable[[str], _T], path: str) -> _T:
    """Read a second time after an error: NFS reports a stale handle only once."""
    try:
        return read(path)
    except (*MISSING, IrregularFile):
        raise
    except OSError:
        return read(path)


def _content(path: str) -> bytes:
    # A state may be a symbolic link to another disk; its manifest says its size.
    large = has_tensors(path.rpartition("/")[2])
    return read_regular(path, UNLIMITED if large else LARGEST_NOTE, follow=large)


def _link(source: Path, target: Path) -> None:
    """Make a hard link to a file that is already durable; copy and sync it if links fail."""
    try:
        os.link(source, target)
    except OSError as problem:
        if problem.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
