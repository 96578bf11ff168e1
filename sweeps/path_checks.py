"""Check directories that a user names for output: writable, and safe from other users.

What must not live here: which files are written there (`paths`).
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from sweeps.errors import UserError


def check_writable(directory: Path, option: str) -> None:
    """Check that files can be written to a directory, which may not exist yet.

    Permissions are not enough: a file system may be read-only, full, or unable to store files. The
    check therefore writes a file, and removes it with every directory that it created.

    Args:
        directory: Where files will be written.
        option: The option that names it, such as `--export`.

    Raises:
        UserError: Files cannot be written.
    """
    directory = directory.absolute()
    missing = [each for each in (directory, *directory.parents) if not os.path.lexists(each)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"{option} {directory}: files cannot be written there ({error.strerror}); the "
            "directory must be writable, or its parent if it does not exist; choose another, or "
            "correct its permissions"
        ) from error
    finally:
        for each in missing:  # the innermost first; a directory with other files stays
            with contextlib.suppress(OSError):
                each.rmdir()


def check_private(directory: Path, option: str) -> None:
    """Check that files can be written to a directory, and that no other user can replace them.

    Raises:
        UserError: Files cannot be written there, or another user could replace them.
    """
    _check_owner(directory.absolute(), option, for_file=False)
    check_writable(directory, option)


def check_file(path: Path, option: str) -> None:
    """Check that a file can be written or overwritten, and that no other user can redirect it.

    Raises:
        UserError: The file cannot be written, or another user could redirect it.
    """
    if path.is_symlink() and not is_ours(owner := os.lstat(path).st_uid):
        raise UserError(
            f"{option} {path}: is a symbolic link that belongs to user {owner}; only your own "
            "links are followed; remove it, or choose another file"
        )
    if path.is_dir():
        raise UserError(
            f"{option} {path}: is a directory; the option names a file; write one in it, such as "
            f"{path / 'report.html'}"
        )
    _check_owner(Path(os.path.realpath(path)).parent, option, for_file=True)
    check_writable(path.parent, option)


def _check_owner(directory: Path, option: str, *, for_file: bool) -> None:
    """Check that no other user can replace files in a directory, or in its existing parent.

    Args:
        directory: The directory, which may not exist yet.
        option: The option that names it.
        for_file: Whether one file is renamed into place. That is safe in directories such as /tmp,
            where every user may create files but replace only their own.

    Raises:
        UserError: Another user can.
    """
    place = next(each for each in (directory, *directory.parents) if each.exists())
    found = os.stat(place)
    if not is_ours(found.st_uid):
        raise UserError(
            f"{option} {directory}: {place} belongs to user {found.st_uid}, who could replace "
            "your files there; choose a directory of your own"
        )
    is_shared = found.st_mode & stat.S_IWOTH
    in_one_step = for_file or place != directory
    if is_shared and not (in_one_step and found.st_mode & stat.S_ISVTX):
        raise UserError(
            f"{option} {directory}: every user may write to {place} (mode "
            f"{stat.S_IMODE(found.st_mode):o}), and so replace your files there; choose another "
            f"directory, or correct it: chmod o-w {place}"
        )


def check_unshared(directory: Path) -> None:
    """Check that no other user can write to a directory, or put another one in its place.

    Raises:
        UserError: Another user can.
    """
    place = Path(os.path.realpath(directory))
    for each in (place, *place.parents):
        found = os.stat(each)
        if not is_ours(found.st_uid):
            raise UserError(f"{each} belongs to user {found.st_uid}")
        if found.st_mode & stat.S_IWOTH and not (each != place and found.st_mode & stat.S_ISVTX):
            raise UserError(f"every user may write to {each}")


def is_ours(owner: int) -> bool:
    """Return whether a file's owner is this user or root, who may access every file anyway.

    With mapped user ids, root is the root of the container.
    """
    return owner in (os.geteuid(), 0)
