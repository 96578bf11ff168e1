"""Generations in a directory of a local or network file system, committed by a rename.

What must not live here: what all storages share (`generations`), and which storage a run has
(`locate`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar

from trainable.storage.durable import make_directory, sync_directory, sync_open_file
from trainable.storage.generations import (
    MANIFEST,
    MISSING,
    STATE,
    Write,
    fenced,
    is_generation,
    quarantined,
    reading,
    unused_name,
)
from trainable.storage.regular_files import LARGEST_NOTE, UNLIMITED, IrregularFile, read_regular

_OWN = ".writing-"
_NEW, _GONE, _DAMAGED = "new-", "gone-", "damaged-"
_NO_LINKS = {errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV}

_T = TypeVar("_T")


class LocalFiles:
    """Generations in a directory, committed by a rename.

    A writer writes in a directory of its own, `.writing-<token>/`, and everything it adds, removes
    or sets aside passes through it by a rename. The next writer renames that directory away
    before it looks at anything: from then on none of the earlier one's renames finds its way,
    even if it was stopped for an hour in front of one.

    Args:
        root: The directory; made by `open`.
    """

    remedy = "free space, correct the permissions, or see that the disk answers"

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def writer_dir(self) -> Path:
        """This writer's own room; gone once it is fenced or closed."""
        return self._root / f"{_OWN}{uuid.uuid4().hex[:12]}"

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
        room = self._root / quarantined()
        return sorted(quarantined(path.name) for path in room.glob("*"))

    def read(self, name: str, file: str) -> bytes:
        with reading(self, f"{name}/{file}"):
            return _ask_again(_content, f"{self._root}/{name}/{file}")

    def length(self, name: str, file: str) -> int:
        with reading(self, f"{name}/{file}"):
            return _ask_again(os.path.getsize, f"{self._root}/{name}/{file}")

    def open(self) -> None:
        make_directory(self._root)
        self.writer_dir.mkdir()
        for other in self._root.glob(f"{_OWN}*"):
            if other != self.writer_dir:
                taken = self.writer_dir / f"{_GONE}{other.name}"
                with contextlib.suppress(FileNotFoundError):  # it has just closed by itself
                    other.rename(taken)
                self._remove_stale_writer(taken)
        sync_directory(self._root)
        if not self.writer_dir.is_dir():  # two opened at once; one of them goes on
            raise fenced(self._root)

    def commit(self, name: str, write: Write) -> None:
        aside = self.writer_dir / f"{_NEW}{name}"
        with self.translate_fenced():
            aside.mkdir()
            try:
                with (aside / STATE).open("xb") as file:
                    manifest = write(file)
                    sync_open_file(file)
                with (aside / MANIFEST).open("xb") as file:
                    file.write(manifest)
                    sync_open_file(file)
            except BaseException:  # a full disk is not left with half a state on it; raised again
                shutil.rmtree(aside, ignore_errors=True)
                raise
            sync_directory(aside)
            self.rename(aside, self._root / name)
            sync_directory(self._root)

    def link(self, generation: Path, name: str) -> None:
        """Add a generation of another run on the same file system: the same bytes under a second
        name, which stay when the other run removes its own; copied where there are no links.

        Raises:
            Fenced: Another process has opened the run.
        """
        aside = self.writer_dir / f"{_NEW}{name}"
        with self.translate_fenced():
            aside.mkdir()
            for file in (STATE, MANIFEST):
                _link(generation / file, aside / file)
            sync_directory(aside)
            self.rename(aside, self._root / name)
            sync_directory(self._root)

    def remove(self, name: str) -> None:
        aside = self.writer_dir / f"{_GONE}{name}"
        with self.translate_fenced():
            self.rename(self._root / name, aside)
            _remove_tree(aside)

    def quarantine(self, name: str) -> None:
        aside = self.writer_dir / f"{_DAMAGED}{name}"
        with self.translate_fenced():
            self.rename(self._root / name, aside)
            self._move_to_quarantine(aside)

    def replace(self, path: Path, content: bytes) -> None:
        """Replace another file of the run, at once and durably.

        Whoever still appends to the one before it, appends to nothing.

        Raises:
            Fenced: Another process has opened the run.
        """
        aside = self.writer_dir / path.name
        with self.translate_fenced():
            with aside.open("wb") as file:
                file.write(content)
                sync_open_file(file)
            self.rename(aside, path)
            sync_directory(path.parent)

    def close(self) -> None:
        shutil.rmtree(self.writer_dir, ignore_errors=True)  # gone already when it is fenced

    @contextlib.contextmanager
    def translate_fenced(self) -> Iterator[None]:
        """What the system says of a file that is gone becomes `WriterReplaced`, if that is why."""
        try:
            yield
        except OSError as problem:
            # A network file system knows a file that another host has removed by its handle only.
            if problem.errno not in (errno.ENOENT, errno.ESTALE) or os.path.isdir(self.writer_dir):
                raise
            raise fenced(self._root) from problem

    def has_writer(self) -> bool:
        """Whether a writer's room is there: of one that lives, or of one that was killed."""
        return any(self._root.glob(f"{_OWN}*"))

    def rename(self, source: Path, target: Path) -> None:
        """Move within the run's file system, atomically."""
        source.rename(target)

    def _move_to_quarantine(self, aside: Path) -> None:
        room = self._root / quarantined()
        # Not synced until it holds what is moved: a power loss in between must not find this
        # neither here nor there.
        room.mkdir(exist_ok=True)
        name, count = aside.name.removeprefix(_DAMAGED), 0
        target = room / name
        while target.exists():
            count += 1
            target = room / f"{name}-{count}"
        self.rename(aside, target)
        sync_directory(room)
        sync_directory(self._root)

    def _remove_stale_writer(self, other: Path) -> None:
        """Finish what another writer had begun to set aside, and remove the rest of its room."""
        if other.exists():
            for aside in other.glob(f"{_DAMAGED}*"):
                self._move_to_quarantine(aside)
            for nested in other.glob(f"{_GONE}{_OWN}*"):  # it died while it took over from another
                self._remove_stale_writer(nested)
            _remove_tree(other)


def _ask_again(ask: Callable[[str], _T], path: str) -> _T:
    """Ask for a file once more: a stale handle, of what another host removed, is gone then."""
    try:
        return ask(path)
    except (*MISSING, IrregularFile):
        raise
    except OSError:
        return ask(path)


def _content(path: str) -> bytes:
    # A state may have been moved to another disk; its size is that of its manifest.
    state = path.endswith(f"/{STATE}")
    return read_regular(path, UNLIMITED if state else LARGEST_NOTE, follow=state)


def _remove_tree(path: Path) -> None:
    """Remove a directory; over NFS it keeps a nameless rest while someone here reads a file of it.

    The rest goes with the writer's room, once nobody reads it any more.
    """
    try:
        shutil.rmtree(path)
    except OSError as problem:
        if problem.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        shutil.rmtree(path, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """Give a file, which survives a power loss already, a second name."""
    try:
        os.link(source, target)
    except OSError as problem:
        if problem.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
