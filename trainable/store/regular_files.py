"""Open the files of a sweep's directory: only regular files of a bounded size, without blocking.

A FIFO instead of a file would block its reader for ever. A device or a sparse file would fill the
memory. A symbolic link would make a writer change a file elsewhere. All code that opens a file of
a sweep by name uses this module; `check` is for files that a library opens (SQLite).
What must not live here: what is in the files.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MIB, GIB = 1 << 20, 1 << 30
LARGEST_NOTE = MIB
"""The size limit in bytes for small files of a process, such as a lock or a heartbeat."""
LARGEST_TEXT = 64 * MIB
"""The size limit in bytes for a file that describes a sweep or a run, such as its revisions."""
LARGEST_CURVE = 64 * GIB
LARGEST_DATABASE = 256 * GIB
UNLIMITED = 1 << 62
"""For a file whose size is checked in another way."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
_NO_FILE = {errno.ELOOP: stat.S_IFLNK, errno.EISDIR: stat.S_IFDIR, errno.ENXIO: stat.S_IFSOCK}
"""The kind of file for each error with which `open` fails."""


class IrregularFile(OSError):
    """A path is not a regular file, or the file is far too large."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(
            f"{os.fspath(path)} {what}; a sweep opens only regular files of bounded size; find "
            "out who put it there, remove it, and restore the file from a backup"
        )


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    *,
    limit: int,
    follow: bool = False,
    mode: int = 0o666,
) -> int:
    """Open a regular file without blocking."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise IrregularFile(path, f"is {_KINDS[_NO_FILE[error.errno]]}") from None
    try:
        _check(path, os.fstat(file), limit)
    except BaseException:  # close the descriptor; raised again
        os.close(file)
        raise
    return file


def read_regular(path: str | os.PathLike[str], limit: int, *, follow: bool = False) -> bytes:
    """Return a regular file's content; see `open_regular`."""

    def opener(name: str, flags: int) -> int:
        return open_regular(name, flags, limit=limit, follow=follow)

    with open(path, "rb", buffering=0, opener=opener) as file:  # one read needs no buffer
        return file.read()


def replace_regular(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace a file atomically. A symbolic link at its path or its temporary path is replaced."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)  # left by a process that was killed, or put there as a link
    try:
        with aside.open("xb") as file:
            file.write(content)
            if durable:
                sync_open_file(file)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def create_regular(path: Path, content: bytes) -> None:
    """Create a file completely or not at all, even if this process is killed."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.unlink(missing_ok=True)  # left by a process that was killed
        with aside.open("xb") as file:
            file.write(content)
        try:
            os.link(aside, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            os.rename(aside, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def check(path: str | os.PathLike[str], limit: int, *, follow: bool = False) -> bool:
    """Check a file before a library opens it."""
    try:
        found = os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        if follow and os.path.islink(path):
            raise IrregularFile(path, "is a symbolic link to nothing") from None
        return False
    _check(path, found, limit)
    return True


def check_database(path: Path) -> bool:
    """Check an SQLite database and SQLite's other files for it, before SQLite opens them.

    The database may be a symbolic link, because users link a ledger to a local disk.
    """
    for suffix in ("-wal", "-journal", "-shm"):
        check(f"{path}{suffix}", LARGEST_DATABASE)
    return check(path, LARGEST_DATABASE, follow=True)


def _check(path: str | os.PathLike[str], found: os.stat_result, limit: int) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise IrregularFile(path, f"is {_KINDS.get(kind, 'no file')}")
    if found.st_size > limit:
        raise IrregularFile(path, f"has {found.st_size} bytes, of at most {limit}")


def make_directory(path: Path) -> None:
    """Make a directory and its parents, so that they survive a power loss."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def probe_directory(path: Path) -> None:
    """Write, sync and remove a small file in a directory; raises OSError where that fails."""
    probe = path / f".probe-{uuid.uuid4().hex[:12]}"
    try:
        with probe.open("xb") as file:
            file.write(bytes(4096))
            sync_open_file(file)
    finally:
        probe.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Make a file and its name survive a power loss."""
    sync_directory(path)
    sync_directory(path.parent)


def sync_open_file(file: BinaryIO) -> None:
    """Make a file's content survive a power loss."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make a directory's entries survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
