"""Where the generations of one run lie, and every call that persists or removes one.

`Files` is what the store asks of a storage; `LocalFiles` is a directory on a local or network file
system, `objects.ObjectFiles` a prefix in an object store. Both give the same promise: whatever is
stopped at whatever moment, a generation has a manifest only when it is whole, and a process that
another one has replaced changes nothing that is there. `files_of` tells which of them a run has.
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

# A second generation of the same step is `step-00000120.1`: it exists when a run returned to a
# step from elsewhere, or when fp16 skipped every window between a checkpoint and the end of its
# epoch. In an object store the name has the writer's token too: `step-00000120-0f3a91c2d4e5`.
_NAME = re.compile(r"step-\d{8,}(?:-[0-9a-f]{12})?(?:\.\d+)?")
_QUARANTINE = "quarantine"
_OWN = ".writing-"
_NEW, _GONE, _DAMAGED = "new-", "gone-", "damaged-"
_MISSING = (FileNotFoundError, NotADirectoryError)
_NO_LINKS = {errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV}

_LIMITS = {
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`, RLIMIT_FSIZE), or see where "
    "the task sets it",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`, RLIMIT_NOFILE), or close what the "
    "task leaves open",
    errno.ENOMEM: "raise the limit on memory (`ulimit -v`, RLIMIT_AS), or see what takes it",
}
"""What to do where a process has met a limit of its own: no room on a disk helps."""

_T = TypeVar("_T")
Write = Callable[[BinaryIO], bytes]
"""Writes a state into an open file and returns the manifest that describes what it wrote."""


class Files(Protocol):
    """The generations of one run. A generation is a name and two files, `STATE` and `MANIFEST`.

    Reading is for any process. Writing needs `open` first, and every writing method raises
    `WriterReplaced` once another process has opened the same generations.
    """

    remedy: str
    """What to do when the storage refuses, in words."""

    def at(self, address: str) -> Files:
        """Return the generations at another address of the same storage."""
        ...

    def address(self, name: str) -> str:
        """Return where a generation lies: a path, or `s3://...`; of no name: where all lie."""
        ...

    def names(self) -> list[str]:
        """Return the names of what may be generations; only a manifest that verifies tells."""
        ...

    def unused(self, step: int) -> str:
        """Return a name for a new generation of a step."""
        ...

    def damaged(self) -> list[str]:
        """Return the names of what is in quarantine; `read` takes them too."""
        ...

    def read(self, name: str, file: str) -> bytes:
        """Return a file's content; FileNotFoundError or NotADirectoryError when it is not there.

        Raises:
            StorageError: The storage cannot be read; what lies there is not damaged.
        """
        ...

    def length(self, name: str, file: str) -> int:
        """Return a file's length in bytes; fails as `read` does."""
        ...

    def open(self) -> None:
        """Become the one writer: shut out whoever was it, and remove what it left unfinished."""
        ...

    def commit(self, name: str, write: Write) -> None:
        """Add a generation: it is durable when this returns, and not to be seen before."""
        ...

    def remove(self, name: str) -> None:
        """Remove a generation: the manifest is the first of it that goes."""
        ...

    def quarantine(self, name: str) -> None:
        """Move a damaged generation to where it can be looked at and is never taken for one."""
        ...

    def close(self) -> None:
        """Stop being the writer, and leave nothing behind."""
        ...


class RunFiles(Files, Protocol):
    """The generations of one run, with what keeps the files beside them to the same writer."""

    def replace(self, path: Path, content: bytes) -> None:
        """Replace another file of the run, at once and durably."""
        ...

    def translate_fenced(self) -> AbstractContextManager[None]:
        """What the system says of a file that is gone becomes `WriterReplaced`, if that is why."""
        ...

    def has_writer(self) -> bool:
        """Whether a writer's room is there: of one that lives, or of one that was killed."""
        ...


def files_of(run: Path, address: str | None = None) -> RunFiles:
    """Return the generations of the run in a directory: the one place that knows where they lie.

    Args:
        run: The run's directory; what is no generation lies there in any case.
        address: Where its generations lie, `s3://BUCKET/...`; None: in `checkpoints/` there.
    """
    if address is None:
        return LocalFiles.of(run)
    from trainable.objects import open_run  # which most runs do not need

    return open_run(address, run)


def files_at(address: str) -> Files:
    """Return the generations at an address, to be read: a directory, or `s3://BUCKET/...`."""
    if "://" not in address:
        return LocalFiles(Path(address))
    from trainable.objects import ObjectFiles, connect

    return ObjectFiles(connect(), address.partition("://")[2])


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
        _sync(self._root)
        if not self.writer_dir.is_dir():  # two opened at once; one of them goes on
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
            except BaseException:  # a full disk is not left with half a state on it; raised again
                shutil.rmtree(aside, ignore_errors=True)
                raise
            _sync(aside)
            self.rename(aside, self._root / name)
            _sync(self._root)

    def link(self, generation: Path, name: str) -> None:
        """Add a generation of another run on the same file system: the same bytes under a second
        name, which stay when the other run removes its own; copied where there are no links.

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
        _sync(room)
        _sync(self._root)

    def _remove_stale_writer(self, other: Path) -> None:
        """Finish what another writer had begun to set aside, and remove the rest of its room."""
        if other.exists():
            for aside in other.glob(f"{_DAMAGED}*"):
                self._move_to_quarantine(aside)
            for nested in other.glob(f"{_GONE}{_OWN}*"):  # it died while it took over from another
                self._remove_stale_writer(nested)
            _remove_tree(other)


@contextlib.contextmanager
def reading(files: Files, what: str = "") -> Iterator[None]:
    """Only what the storage itself says is not there, or is no file, counts as missing or damaged;
    all else is a `StorageError`.

    Args:
        what: Which part of the store is read.
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
    """Return what to do about what the system said.

    Args:
        otherwise: Where it is about the storage and not about a limit of this process.
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
    """Return once a file, under its name, survives a power loss."""
    _sync(path)
    _sync(path.parent)


def is_generation(name: str) -> bool:
    """Whether a name may be a generation's."""
    return _NAME.fullmatch(name) is not None


def quarantined(name: str = "") -> str:
    """Return a generation's name in quarantine; without one, the quarantine's own."""
    return f"{_QUARANTINE}/{name}".rstrip("/")


def unused_name(name: str, names: Collection[str]) -> str:
    """Return `name`, or with the first revision behind it that is not taken."""
    revisions = (f"{name}.{revision}" for revision in itertools.count(1))
    return next(one for one in itertools.chain([name], revisions) if one not in names)


def fenced(place: Path | str) -> WriterReplaced:
    """Return the error of a writer that has been replaced."""
    return WriterReplaced(
        f"another process has taken over {place}, or it was removed; this process has been "
        "replaced and changes nothing there any more; look at the one that goes on"
    )


def _ask_again(ask: Callable[[str], _T], path: str) -> _T:
    """Ask for a file once more: a stale handle, of what another host removed, is gone then."""
    try:
        return ask(path)
    except (*_MISSING, IrregularFile):
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


def replace_file(path: Path, text: str) -> None:
    """Write a small file as a whole; it survives a power loss once this returns."""
    replace_regular(path, text.encode(), durable=True)
    _sync(path.parent)


def _sync_file(file: BinaryIO) -> None:
    """Return once a file's content survives a power loss."""
    file.flush()
    os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Return once a directory's entries survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
