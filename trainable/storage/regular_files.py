"""Opening the files of a sweep's directory: regular files alone, of a bounded size, never waiting.

A FIFO in the place of a file has its reader wait for ever, a device or a sparse file fills the
memory, and a symbolic link leads a writer to a file elsewhere. Whoever opens a file of a sweep by
its name does it here; a library that opens files by itself (SQLite) gets those that `check` has
seen. What must not live here: what is in them.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
LARGEST_NOTE = MIB
"""Of a file in which a process notes something about itself, in bytes."""
LARGEST_TEXT = 64 * MIB
"""Of a file that describes a sweep or a run, in bytes: a spec of a mebibyte and its revisions."""
LARGEST_CURVE = 64 * GIB
LARGEST_DATABASE = 256 * GIB
UNLIMITED = 1 << 62
"""For a file whose size is compared with what is written of it elsewhere."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
_NO_FILE = {errno.ELOOP: stat.S_IFLNK, errno.EISDIR: stat.S_IFDIR, errno.ENXIO: stat.S_IFSOCK}
"""What lies there, by the error with which the system refuses to open it."""


class IrregularFile(OSError):
    """What lies in the place of a file is none, or is far too large for one.

    Args:
        path: The file's.
        what: What is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(
            f"{os.fspath(path)} {what}; a sweep keeps what it knows in regular files of bounded "
            "size, and opens nothing else; see who put it there, remove it, and restore the file "
            "from a backup"
        )


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    *,
    limit: int,
    follow: bool = False,
    mode: int = 0o666,
) -> int:
    """Open a regular file, without waiting for anybody.

    Args:
        path: The file.
        flags: Of `os.open`.
        limit: The most bytes that it may have.
        follow: It may be a symbolic link to such a file, as where somebody moved what is large
            to another disk. Never for who writes.
        mode: Its permissions where it is made.

    Returns:
        A file descriptor.

    Raises:
        IrregularFile: Something else lies there, or it is too large.
        OSError: It cannot be opened, or is not there.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise IrregularFile(path, f"is {_KINDS[_NO_FILE[error.errno]]}") from None
    try:
        _check(path, os.fstat(file), limit)
    except BaseException:  # it is nobody's any more; raised again
        os.close(file)
        raise
    return file


def read_regular(path: str | os.PathLike[str], limit: int, *, follow: bool = False) -> bytes:
    """Return a regular file's content; see `open_regular`.

    Raises:
        IrregularFile: Something else lies there, or it is too large.
        OSError: It cannot be read, or is not there.
    """

    def opener(name: str, flags: int) -> int:
        return open_regular(name, flags, limit=limit, follow=follow)

    with open(path, "rb", buffering=0, opener=opener) as file:  # all of it is read at once
        return file.read()


def replace_regular(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file as a whole or not at all, and through no link: neither one in its place, nor
    one where it is written aside.

    Args:
        durable: Return once the content survives a power loss; its name may not yet.

    Raises:
        OSError: It cannot be written.
    """
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)  # of a process that died while it wrote, or a stranger's
    with aside.open("xb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(aside, path)


def check(path: str | os.PathLike[str], limit: int, *, follow: bool = False) -> bool:
    """Look at a file that a library is going to open.

    Returns:
        Whether there is one.

    Raises:
        IrregularFile: Something else lies there, or it is too large.
        OSError: It cannot be looked at.
    """
    try:
        found = os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        if follow and os.path.islink(path):
            raise IrregularFile(path, "is a symbolic link to nothing") from None
        return False
    _check(path, found, limit)
    return True


def check_database(path: Path) -> bool:
    """Look at an SQLite database and at what SQLite keeps beside it, before it opens them.

    The database itself may be a symbolic link: a ledger is moved to a local disk so.

    Returns:
        Whether there is a database.

    Raises:
        IrregularFile: One of them is no regular file.
        OSError: It cannot be looked at.
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
