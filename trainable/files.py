"""Where the generations of one run lie, and every call that persists or removes one.

`Files` is what the store asks of a storage; `LocalFiles` is a directory on a local or network file
system, `ObjectFiles` a prefix in an object store, by fsspec. Both give the same promise: whatever
is stopped at whatever moment, a generation has a manifest only when it is whole, and a process
that another one has replaced changes nothing that is there.
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
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from trainable.errors import Fenced

STATE = "state.pt"
MANIFEST = "manifest.json"

# A second generation of the same step is `step-00000120.1`: it exists when a run returned to a
# step from elsewhere, or when fp16 skipped every window between a checkpoint and the end of its
# epoch. In an object store the name has the writer's token too: `step-00000120-0f3a91c2d4e5`.
_NAME = re.compile(r"step-\d{8,}(?:-[0-9a-f]{12})?(?:\.\d+)?")
_QUARANTINE = "quarantine"
_OWN = ".writing-"
_NEW, _GONE, _DAMAGED = "new-", "gone-", "damaged-"
_NO_LINKS = {errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV}

Write = Callable[[BinaryIO], bytes]
"""Writes a state into an open file and returns the manifest that describes what it wrote."""


class Files(Protocol):
    """The generations of one run. A generation is a name and two files, `STATE` and `MANIFEST`.

    Reading is for any process. Writing needs `open` first, and every writing method raises
    `Fenced` once another process has opened the same generations.
    """

    def at(self, directory: Path) -> Files:
        """Return the generations of another run on the same storage."""
        ...

    def path(self, name: str) -> Path:
        """Return where a generation lies."""
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
        """Return a file's content; OSError when it is not there."""
        ...

    def length(self, name: str, file: str) -> int:
        """Return a file's length in bytes; OSError when it is not there."""
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


class LocalFiles:
    """Generations in a directory, committed by a rename.

    A writer writes in a directory of its own, `.writing-<token>/`, and everything it adds, removes
    or sets aside passes through it by a rename. The next writer renames that directory away
    before it looks at anything: from then on none of the earlier one's renames finds its way,
    even if it was stopped for an hour in front of one.

    Args:
        root: The directory; made by `open`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def own(self) -> Path:
        """This writer's own room; gone once it is fenced or closed."""
        return self._root / f"{_OWN}{uuid.uuid4().hex[:12]}"

    @classmethod
    def of(cls, run: Path) -> LocalFiles:
        """Return the generations of the run in a directory."""
        return cls(run / "checkpoints")

    def at(self, directory: Path) -> LocalFiles:
        return LocalFiles(directory)

    def path(self, name: str) -> Path:
        return self._root / name

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(filter(_NAME.fullmatch, os.listdir(self._root)))
        return []

    def unused(self, step: int) -> str:
        return _unused(f"step-{step:08d}", self.names())

    def damaged(self) -> list[str]:
        room = self._root / _QUARANTINE
        return sorted(f"{_QUARANTINE}/{path.name}" for path in room.glob("*"))

    def read(self, name: str, file: str) -> bytes:
        # unbuffered: all of it is read at once
        with open(f"{self._root}/{name}/{file}", "rb", buffering=0) as content:
            return content.read()

    def length(self, name: str, file: str) -> int:
        return os.stat(f"{self._root}/{name}/{file}").st_size

    def open(self) -> None:
        make_directory(self._root)
        self.own.mkdir()
        for other in self._root.glob(f"{_OWN}*"):
            if other != self.own:
                taken = self.own / f"{_GONE}{other.name}"
                with contextlib.suppress(FileNotFoundError):  # it has just closed by itself
                    other.rename(taken)
                self._bury(taken)
        _sync(self._root)
        if not self.own.is_dir():  # two opened at once; one of them goes on
            raise fenced(self._root)

    def commit(self, name: str, write: Write) -> None:
        aside = self.own / f"{_NEW}{name}"
        with self.unless_fenced():
            aside.mkdir()
            try:
                with (aside / STATE).open("xb") as file:
                    manifest = write(file)
                    _sync_file(file)
                with (aside / MANIFEST).open("xb") as file:
                    file.write(manifest)
                    _sync_file(file)
            except OSError:  # a full disk is not left with half a state on it
                shutil.rmtree(aside, ignore_errors=True)
                raise
            _sync(aside)
            self.rename(aside, self._root / name)
            _sync(self._root)

    def link(self, generation: Path, name: str) -> None:
        """Add a generation of another run on the same file system: the same bytes under a second
        name, which stay when the other run removes its own; copied where there are no links.

        Raises:
            Fenced: Another process has opened the run.
        """
        aside = self.own / f"{_NEW}{name}"
        with self.unless_fenced():
            aside.mkdir()
            for file in (STATE, MANIFEST):
                _link(generation / file, aside / file)
            _sync(aside)
            self.rename(aside, self._root / name)
            _sync(self._root)

    def remove(self, name: str) -> None:
        aside = self.own / f"{_GONE}{name}"
        with self.unless_fenced():
            self.rename(self._root / name, aside)
            _remove_tree(aside)

    def quarantine(self, name: str) -> None:
        aside = self.own / f"{_DAMAGED}{name}"
        with self.unless_fenced():
            self.rename(self._root / name, aside)
            self._move_to_quarantine(aside)

    def replace(self, path: Path, content: bytes) -> None:
        """Replace another file of the run, at once and durably.

        Whoever still appends to the one before it, appends to nothing.

        Raises:
            Fenced: Another process has opened the run.
        """
        aside = self.own / path.name
        with self.unless_fenced():
            with aside.open("wb") as file:
                file.write(content)
                _sync_file(file)
            self.rename(aside, path)
            _sync(path.parent)

    def close(self) -> None:
        shutil.rmtree(self.own, ignore_errors=True)  # gone already when it is fenced

    @contextlib.contextmanager
    def unless_fenced(self) -> Iterator[None]:
        """What the system says of a file that is gone becomes `Fenced`, if that is why."""
        try:
            yield
        except OSError as problem:
            # A network file system knows a file that another host has removed by its handle only.
            if problem.errno not in (errno.ENOENT, errno.ESTALE) or os.path.isdir(self.own):
                raise
            raise fenced(self._root) from problem

    def has_writer(self) -> bool:
        """Whether a writer's room is there: of one that lives, or of one that was killed."""
        return any(self._root.glob(f"{_OWN}*"))

    def rename(self, source: Path, target: Path) -> None:
        """Move within the run's file system, atomically."""
        source.rename(target)

    def _move_to_quarantine(self, aside: Path) -> None:
        room = self._root / _QUARANTINE
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

    def _bury(self, other: Path) -> None:
        """Finish what another writer had begun to set aside, and remove the rest of its room."""
        if other.exists():
            for aside in other.glob(f"{_DAMAGED}*"):
                self._move_to_quarantine(aside)
            for nested in other.glob(f"{_GONE}{_OWN}*"):  # it died while it took over from another
                self._bury(nested)
            _remove_tree(other)


class ObjectFiles:
    """Generations below a prefix of an object store: nothing is renamed, and nothing is synced.

    An object is whole or not there, so the manifest, written last and removed first, is what
    commits. A writer signs `writer` and looks again before each manifest. No two writers share
    a name: one that is replaced between this look and its write gets one generation of its own
    in, and changes nobody's. That one is whole, because the next writer leaves alone what its
    predecessor has uploaded, and the newest at most until the next writer has saved twice. If two
    have replaced it by then, its state is gone, and it is set aside as damaged.

    Args:
        system: An `fsspec.AbstractFileSystem`.
        root: The prefix, such as `bucket/sweeps/digits/trials/0007/checkpoints`.
    """

    def __init__(self, system: Any, root: Path) -> None:
        self._system, self._root = system, root
        self._token = uuid.uuid4().hex[:12]

    def at(self, directory: Path) -> ObjectFiles:
        return ObjectFiles(self._system, directory)

    def path(self, name: str) -> Path:
        return self._root / name

    def names(self) -> list[str]:
        return sorted(name for name in self._list(self._root) if _NAME.fullmatch(name))

    def unused(self, step: int) -> str:
        return _unused(f"step-{step:08d}-{self._token}", self.names())

    def damaged(self) -> list[str]:
        room = self._list(self._root / _QUARANTINE)
        return sorted(f"{_QUARANTINE}/{name}" for name in room)

    def read(self, name: str, file: str) -> bytes:
        content: bytes = self._system.cat_file(self._key(name, file))
        return content

    def length(self, name: str, file: str) -> int:
        return int(self._system.size(self._key(name, file)))

    def open(self) -> None:
        self._system.makedirs(str(self._root), exist_ok=True)
        before = self._signature()
        self._system.pipe_file(self._key("writer"), self._token.encode())
        for name in self.names():
            if before is not None and f"-{before}" in name:
                continue  # its manifest may be on its way
            if not self._system.exists(self._key(name, MANIFEST)):
                self._system.rm(self._key(name), recursive=True)

    def commit(self, name: str, write: Write) -> None:
        self._check_fence()
        self._system.makedirs(self._key(name), exist_ok=True)
        with self._system.open(self._key(name, STATE), "wb") as file:
            manifest = write(file)
        self._check_fence()
        self._system.pipe_file(self._key(name, MANIFEST), manifest)

    def remove(self, name: str) -> None:
        self._check_fence()
        if self._system.exists(self._key(name, MANIFEST)):
            self._system.rm_file(self._key(name, MANIFEST))
        with contextlib.suppress(FileNotFoundError):  # a replaced writer was at it, too
            self._system.rm(self._key(name), recursive=True)

    def quarantine(self, name: str) -> None:
        self._check_fence()
        target, count = f"{_QUARANTINE}/{name}", 0
        while self._system.exists(self._key(target)):
            count += 1
            target = f"{_QUARANTINE}/{name}-{count}"
        self._system.makedirs(self._key(target), exist_ok=True)
        for file in (STATE, MANIFEST):
            if self._system.exists(self._key(name, file)):
                self._system.cp_file(self._key(name, file), self._key(target, file))
        self.remove(name)

    def close(self) -> None:
        if self._signature() == self._token:
            self._system.rm_file(self._key("writer"))

    def _check_fence(self) -> None:
        if self._signature() != self._token:
            raise fenced(self._root)

    def _signature(self) -> str | None:
        """The token of the last writer that has not closed."""
        try:
            return bytes(self._system.cat_file(self._key("writer"))).decode()
        except FileNotFoundError:
            return None

    def _key(self, *names: str) -> str:
        return str(self._root.joinpath(*names))

    def _list(self, prefix: Path) -> list[str]:
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(str(prefix), detail=False)
        except FileNotFoundError:
            return []
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]


def make_directory(path: Path) -> None:
    """Make a directory and its parents, so that they survive a power loss."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def _unused(name: str, names: Collection[str]) -> str:
    """Return `name`, or with the first revision behind it that is not taken."""
    revisions = (f"{name}.{revision}" for revision in itertools.count(1))
    return next(one for one in itertools.chain([name], revisions) if one not in names)


def fenced(place: Path) -> Fenced:
    """Return the error of a writer that has been replaced."""
    return Fenced(
        f"another process has taken over {place}, or it was removed; this process has been "
        "replaced and changes nothing there any more; look at the one that goes on"
    )


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
