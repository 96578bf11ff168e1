"""Write where a user says, in directories that are writable and safe from other users.

A path that was checked may name something else later: in `/tmp`, another user may create what was
missing. So each output is checked again where it is created, by descriptors. What must not live
here: which files are written (`paths`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sweeps.errors import UserError
from trainable.store.private_files import (
    NotPrivate,
    is_ours,
    opened_directory,
    private_directory,
)

_MOST_LINKS = 40
"""As many symbolic links as Linux follows in one path."""


def check_writable(directory: Path, option: str, *, named: Path | None = None) -> None:
    """Check that files can be written to a directory, which may not exist yet.

    Permissions are not enough: a file system may be read-only, full, or unable to store files. The
    check therefore writes a file without a name, to the deepest directory that exists. It creates
    no directory, whose name another user could take afterwards.
    """
    directory = directory.absolute()
    place = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(directory)  # its name may be too long, or a parent be a file
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(
            f"{option} {named or directory}: files cannot be written there ({error.strerror}); "
            "the directory must be writable, or its parent if it does not exist; choose another, "
            "or correct its permissions"
        ) from error


def check_private(directory: Path, option: str) -> None:
    """Check that files can be written to a directory, and that no other user can replace them."""
    _private(directory, option)
    check_writable(directory, option)


@contextlib.contextmanager
def make_private(directory: Path, option: str) -> Iterator[Path]:
    """Create a directory, which may exist, and yield its real path, by which to write to it.

    If it is new and stays empty, it is removed afterwards.
    """
    place = _private(directory, option)
    missing = [each for each in (place, *place.parents) if not os.path.lexists(each)]
    place = _private(directory, option, create=True)
    try:
        yield place
    finally:
        for each in missing:  # the innermost first
            with contextlib.suppress(OSError):
                each.rmdir()


def check_file(path: Path, option: str) -> None:
    """Check that a file can be written or overwritten, and that no other user can redirect it."""
    if path.is_dir():
        raise UserError(
            f"{option} {path}: is a directory; the option names a file; write one in it, such as "
            f"{path / 'report.html'}"
        )
    for each in dict.fromkeys((path, Path(os.path.realpath(path)))):
        # Renamed into place, which is safe in directories such as /tmp.
        directory = _private(each.parent, option, named=path, sticky=True)
        if os.path.lexists(each):
            _check_found(os.lstat(each), os.stat(directory), path, option)
    if not path.exists() or path.is_file():
        check_writable(path.parent, option, named=path)


def write_file(path: Path, content: bytes, option: str, *, overwrite: bool = True) -> None:
    """Write a file completely or not at all; write directly into a pipe or a device.

    A symbolic link stays, and what it names is written.
    """
    named = path
    try:
        for _ in range(_MOST_LINKS):
            with opened_directory(path.parent) as (place, directory):
                found = _found(path.name, directory)
                if found is not None:
                    _check_found(found, os.fstat(directory), named, option)
                if found is None or stat.S_ISREG(found.st_mode) or not overwrite:
                    _place(path.name, directory, content, overwrite=overwrite)
                    return
                here = place / path.name
                if not stat.S_ISLNK(found.st_mode):
                    _write_into(path.name, directory, content, os.O_NOFOLLOW, (named, option))
                    return
                path = place / os.readlink(path.name, dir_fd=directory)
                if here.exists() and not os.path.lexists(path):  # /dev/stdout that is a pipe
                    _write_into(here.name, directory, content, 0, None)
                    return
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    except FileExistsError:
        raise
    except NotPrivate as error:
        raise UserError(f"{option} {named}: {error}") from error
    except OSError as error:
        raise UserError(
            f"{option} {named}: cannot be written ({error.strerror}); it has {len(content)} "
            "bytes; free disk space, or choose another file"
        ) from error


def _found(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _check_found(
    found: os.stat_result, directory: os.stat_result, path: Path, option: str
) -> None:
    """Check what has the name of an output."""
    if is_ours(found.st_uid):
        return
    if stat.S_ISLNK(found.st_mode):
        raise UserError(
            f"{option} {path}: is a symbolic link that belongs to user {found.st_uid}; only your "
            "own links are followed; remove it, or choose another file"
        )
    # In other directories, whoever may write to one may replace its files.
    if not stat.S_ISREG(found.st_mode) or directory.st_mode & stat.S_ISVTX:
        raise UserError(
            f"{option} {path}: belongs to user {found.st_uid}; only your own files are replaced "
            "or written into; choose another file"
        )


def _place(name: str, directory: int, content: bytes, *, overwrite: bool) -> None:
    """Write a file under a name that nobody can foresee, and rename it."""
    aside = f".{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = os.open(aside, flags, 0o666, dir_fd=directory)
    try:
        with open(opened, "wb") as file:
            file.write(content)
        if not overwrite:
            with contextlib.suppress(OSError):  # a file system without hard links
                try:
                    os.link(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
                    return
                except FileExistsError:
                    pass
            if _found(name, directory) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        os.replace(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=directory)


def _write_into(
    name: str, directory: int, content: bytes, flags: int, named: tuple[Path, str] | None
) -> None:
    """Write into a pipe or a device, which is checked again once it is open."""
    with open(os.open(name, os.O_WRONLY | os.O_CLOEXEC | flags, dir_fd=directory), "wb") as file:
        if named is not None:
            _check_found(os.fstat(file.fileno()), os.fstat(directory), *named)
        file.write(content)


def _private(
    directory: Path,
    option: str,
    *,
    named: Path | None = None,
    create: bool = False,
    sticky: bool = False,
) -> Path:
    """Call `private_directory`, and name the option in its errors."""
    try:
        return private_directory(directory, create=create, sticky=sticky)
    except NotPrivate as error:
        raise UserError(f"{option} {named or directory}: {error}") from error
    except OSError as error:
        raise UserError(
            f"{option} {named or directory}: {error.strerror} ({error.filename}); a directory is "
            "created when it is missing; choose another, or correct its permissions"
        ) from error
