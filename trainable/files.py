"""Files: the storage of a run's checkpoints, and each call that writes or removes one durably.

`Files` is the protocol that `CheckpointStore` uses. `LocalFiles` is a directory on a local or
network file system, `objects.ObjectFiles` a prefix in an object store. Both guarantee, whenever a
process is killed: a generation has a manifest only if it is complete, and a replaced writer
changes nothing. `files_of` returns the one that a run uses.
What must not live here: what a manifest says (`manifest.py`), or when to save (`checkpoint.py`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Protocol, Self, TypeVar

from redaction.secrets import redact
from trainable.errors import StorageError, WriterReplaced
from trainable.regular_files import (
    LARGEST_NOTE,
    UNLIMITED,
    IrregularFile,
    read_regular,
    replace_regular,
)

STATE = "state.pt"
MANIFEST = "manifest.json"

# A second generation of the same step is `step-00000120.1`. A run writes one when it resumes from
# an older generation, or when fp16 skipped each window between a checkpoint and the epoch's end.
# In an object store the name has the writer's token too: `step-00000120-0f3a91c2d4e5`.
_NAME = re.compile(r"step-\d{8,}(?:-[0-9a-f]{12})?(?:\.\d+)?")
_QUARANTINE = "quarantine"
_WRITER = ".writing-"
_NEW, _REMOVED, _DAMAGED = "new-", "gone-", "damaged-"
_MISSING = (FileNotFoundError, NotADirectoryError)
_NO_LINKS = {errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV}

_LIMITS = {
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`, RLIMIT_FSIZE), or find "
    "where the task sets it",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`, RLIMIT_NOFILE), or close the files "
    "that the task leaves open",
    errno.ENOMEM: "raise the limit on memory (`ulimit -v`, RLIMIT_AS), or find what uses it",
}
"""Remedies for errors that come from a limit of the process, not from the storage."""

_T = TypeVar("_T")
Write = Callable[[BinaryIO], bytes]
"""Writes a state into an open file and returns the manifest that describes what it wrote."""


class Files(Protocol):
    """The generations of one run. A generation is a name and two files, `STATE` and `MANIFEST`.

    Any process may read. A writer calls `open` first; its writing methods raise `WriterReplaced`
    once another process has opened the same generations.
    """

    remedy: str
    """What the user should do when the storage fails; a part of messages."""

    def at(self, address: str) -> Files:
        """Return the generations at another address of the same storage."""
        ...

    def address(self, name: str) -> str:
        """Return a generation's path or `s3://...` address; for "", the one of their parent."""
        ...

    def names(self) -> list[str]:
        """Return the names that generations have; their manifests may still be invalid."""
        ...

    def unused(self, step: int) -> str:
        """Return a name for a new generation of a step."""
        ...

    def damaged(self) -> list[str]:
        """Return the names of the quarantined generations; `read` accepts them too."""
        ...

    def read(self, name: str, file: str) -> bytes:
        """Return a file's content.

        Raises:
            OSError: FileNotFoundError or NotADirectoryError: the file does not exist.
            StorageError: The storage cannot be read. The file may be sound.
        """
        ...

    def length(self, name: str, file: str) -> int:
        """Return a file's length in bytes; fails as `read` does."""
        ...

    def open(self) -> None:
        """Become the only writer: block the one before, and remove its unfinished generations."""
        ...

    def commit(self, name: str, write: Write) -> None:
        """Add a generation: invisible before this returns, durable afterwards."""
        ...

    def remove(self, name: str) -> None:
        """Remove a generation, its manifest first."""
        ...

    def quarantine(self, name: str) -> None:
        """Move a damaged generation to the quarantine, where `names` does not list it."""
        ...

    def close(self) -> None:
        """Stop being the writer, and remove the writer's temporary files."""
        ...


class RunFiles(Files, Protocol):
    """The generations of one run, and the other files of the run that have the same writer."""

    def replace(self, path: Path, content: bytes) -> None:
        """Replace another file of the run, atomically and durably."""
        ...

    def translate_fenced(self) -> AbstractContextManager[None]:
        """Raise `WriterReplaced` for a missing-file error that another writer has caused."""
        ...

    def has_writer(self) -> bool:
        """Whether a writer's directory exists: of a running writer, or of one that was killed."""
        ...


def files_of(run: Path, address: str | None = None) -> RunFiles:
    """Return the storage of a run's generations. Only this function decides which one it is.

    Args:
        run: The run's directory; its other files are there in any case.
        address: Where its generations lie, `s3://BUCKET/...`; None: in `checkpoints/` there.
    """
    if address is None:
        return LocalFiles.of(run)
    from trainable.objects import open_run  # most runs do not need it

    return open_run(address, run)


def files_at(address: str) -> Files:
    """Return the generations at an address for reading: a directory, or `s3://BUCKET/...`."""
    if "://" not in address:
        return LocalFiles(Path(address))
    from trainable.objects import ObjectFiles, connect

    return ObjectFiles(connect(), address.partition("://")[2])


class LocalFiles:
    """Generations in a directory, committed by a rename.

    A writer has a directory of its own, `.writing-<token>/`. Whatever it adds, removes or
    quarantines is renamed into or out of that directory. The next writer renames the directory
    away before it reads anything. All later renames of the earlier writer fail, even if it was
    suspended for an hour right before one.

    Args:
        root: The directory; made by `open`.
    """

    remedy = "free space, correct the permissions, or check that the disk responds"

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def writer_dir(self) -> Path:
        """This writer's temporary directory; missing once the writer is replaced or closed."""
        return self._root / f"{_WRITER}{uuid.uuid4().hex[:12]}"

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

    def open(self) -> None:
        make_directory(self._root)
        self.writer_dir.mkdir()
        for other in self._root.glob(f"{_WRITER}*"):
            if other != self.writer_dir:
                taken = self.writer_dir / f"{_REMOVED}{other.name}"
                with contextlib.suppress(FileNotFoundError):  # it has just closed by itself
                    other.rename(taken)
                self._remove_stale_writer(taken)
        _sync(self._root)
        if not self.writer_dir.is_dir():  # two writers opened at once, and the other one won
            raise fenced(self._root)

    def commit(self, name: str, write: Write) -> None:
        aside = self.writer_dir / f"{_NEW}{name}"
        with self.translate_fenced():
            aside.mkdir()
            try:
                with (aside / STATE).open("xb") as file:
                    manifest = write(file)
                    _sync_file(file)
                with (aside / MANIFEST).open("xb") as file:
                    file.write(manifest)
                    _sync_file(file)
            except BaseException:  # a partial state would keep a full disk full; raised again
                shutil.rmtree(aside, ignore_errors=True)
                raise
            _sync(aside)
            self.rename(aside, self._root / name)
            _sync(self._root)

    def link(self, generation: Path, name: str) -> None:
        """Add a generation of another run by hard links, or by a copy where links are impossible.
        It stays when the other run removes its own.

        Raises:
            WriterReplaced: Another process has opened the run.
        """
        aside = self.writer_dir / f"{_NEW}{name}"
        with self.translate_fenced():
            aside.mkdir()
            for file in (STATE, MANIFEST):
                _link(generation / file, aside / file)
            _sync(aside)
            self.rename(aside, self._root / name)
            _sync(self._root)

    def remove(self, name: str) -> None:
        aside = self.writer_dir / f"{_REMOVED}{name}"
        with self.translate_fenced():
            self.rename(self._root / name, aside)
            _remove_tree(aside)

    def quarantine(self, name: str) -> None:
        aside = self.writer_dir / f"{_DAMAGED}{name}"
        with self.translate_fenced():
            self.rename(self._root / name, aside)
            self._move_to_quarantine(aside)

    def replace(self, path: Path, content: bytes) -> None:
        """Replace another file of the run, atomically and durably.

        A replaced writer that still has the old file open appends to the old file alone.

        Raises:
            WriterReplaced: Another process has opened the run.
        """
        aside = self.writer_dir / path.name
        with self.translate_fenced():
            with aside.open("wb") as file:
                file.write(content)
                _sync_file(file)
            self.rename(aside, path)
            _sync(path.parent)

    def close(self) -> None:
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

    def rename(self, source: Path, target: Path) -> None:
        """Move within the run's file system, atomically."""
        source.rename(target)

    def _move_to_quarantine(self, aside: Path) -> None:
        directory = self._root / quarantined()
        # Synced only after the rename: a power loss in between must not lose the generation.
        directory.mkdir(exist_ok=True)
        name, count = aside.name.removeprefix(_DAMAGED), 0
        target = directory / name
        while target.exists():
            count += 1
            target = directory / f"{name}-{count}"
        self.rename(aside, target)
        _sync(directory)
        _sync(self._root)

    def _remove_stale_writer(self, other: Path) -> None:
        """Quarantine what another writer was about to, and remove that writer's directory."""
        if other.exists():
            for aside in other.glob(f"{_DAMAGED}*"):
                self._move_to_quarantine(aside)
            # A writer that was killed while it replaced another one has that one's directory.
            for nested in other.glob(f"{_REMOVED}{_WRITER}*"):
                self._remove_stale_writer(nested)
            _remove_tree(other)


@contextlib.contextmanager
def reading(files: Files, what: str = "") -> Iterator[None]:
    """Raise `StorageError` for any error of the storage, except that a file is missing or is not a
    regular file: only these two say something about a generation.

    Args:
        what: The generation or file that is read; for the message.
    """
    try:
        yield
    except (*_MISSING, IrregularFile):
        raise
    except OSError as problem:
        raise StorageError(
            f"the checkpoints at {files.address(what)} cannot be read: {redact(str(problem))}; "
            f"what was saved there is untouched; {remedy(problem, files.remedy)}, then resume"
        ) from problem


def remedy(problem: OSError, otherwise: str) -> str:
    """Return the remedy for an error of the operating system.

    Args:
        otherwise: The remedy if the error does not come from a limit of this process.
    """
    return _LIMITS.get(problem.errno or 0, otherwise)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, so that they survive a power loss."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def probe_directory(path: Path) -> None:
    """Write, sync and remove a small file in a directory; raises OSError where that fails."""
    probe = path / f".probe-{uuid.uuid4().hex[:12]}"
    try:
        with probe.open("xb") as file:
            file.write(bytes(4096))
            _sync_file(file)
    finally:
        probe.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Make a file and its name survive a power loss."""
    _sync(path)
    _sync(path.parent)


def is_generation(name: str) -> bool:
    """Whether a name has the form of a generation's name."""
    return _NAME.fullmatch(name) is not None


def quarantined(name: str = "") -> str:
    """Return a generation's name in the quarantine; for "", the quarantine's own name."""
    return f"{_QUARANTINE}/{name}".rstrip("/")


def unused_name(name: str, names: Collection[str]) -> str:
    """Return `name`, or `name.1`, `name.2` ...: the first that is not in `names`."""
    revisions = (f"{name}.{revision}" for revision in itertools.count(1))
    return next(one for one in itertools.chain([name], revisions) if one not in names)


def fenced(address: Path | str) -> WriterReplaced:
    """Return the error for a writer that has been replaced."""
    return WriterReplaced(
        f"another process has taken over {address}, or it was removed; this process has been "
        "replaced and changes nothing there any more; look at the process that resumed the run"
    )


def _retry_once(read: Callable[[str], _T], path: str) -> _T:
    """Read a second time after an error: NFS reports a stale handle only once."""
    try:
        return read(path)
    except (*_MISSING, IrregularFile):
        raise
    except OSError:
        return read(path)


def _content(path: str) -> bytes:
    # A state may be a symbolic link to another disk; its manifest says its size.
    state = path.endswith(f"/{STATE}")
    return read_regular(path, UNLIMITED if state else LARGEST_NOTE, follow=state)


def _remove_tree(path: Path) -> None:
    """Remove a directory; on NFS, `.nfs*` files remain of files that a process here has open.

    What remains is removed with the writer's directory.
    """
    try:
        shutil.rmtree(path)
    except OSError as problem:
        if problem.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        shutil.rmtree(path, ignore_errors=True)


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


def replace_file(path: Path, text: str) -> None:
    """Replace a small file atomically; it survives a power loss once this returns."""
    replace_regular(path, text.encode(), durable=True)
    _sync(path.parent)


def _sync_file(file: BinaryIO) -> None:
    """Make a file's content survive a power loss."""
    file.flush()
    os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Make a directory's entries survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
