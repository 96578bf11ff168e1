"""Directories that a user names for what a command writes: can they be written to, and are they
safe from other users?

What must not live here: which files are written there (`layout`, and whoever writes them).
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from sweeps.errors import UserError


def check_place(directory: Path, option: str) -> None:
    """See that files can be written to a directory, which may have to be made for it.

    Permissions alone do not tell: a file system may be read-only, full, or not one for files. So
    a file is written, and removed again with every directory that had to be made.

    Args:
        directory: Where files will be written.
        option: How the user named it, such as `--export`.

    Raises:
        Refused: They cannot.
    """
    directory = directory.absolute()
    missing = [each for each in (directory, *directory.parents) if not os.path.lexists(each)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"{option} {directory}: files cannot be written there ({error.strerror}); a "
            "directory that can be made or written to is needed; choose another, or correct its "
            "permissions"
        ) from error
    finally:
        for each in missing:  # the innermost first; one that somebody else has used stays
            with contextlib.suppress(OSError):
                each.rmdir()


def check_own_place(directory: Path, option: str) -> None:
    """The same, and no other user can replace what is written there, or lead it elsewhere.

    Raises:
        Refused: Files cannot be written there, or another user could change them.
    """
    _check_owner(directory.absolute(), option, for_file=False)
    check_place(directory, option)


def check_file(path: Path, option: str) -> None:
    """See that a file can be written, also over one that exists, and that no other user leads it
    elsewhere. See `check_place`.

    Raises:
        Refused: It cannot, or another user could.
    """
    if path.is_symlink() and not is_ours(owner := os.lstat(path).st_uid):
        raise UserError(
            f"{option} {path}: is a symbolic link that belongs to user {owner}; only your own are "
            "followed; remove it, or name another file"
        )
    if path.is_dir():
        raise UserError(
            f"{option} {path}: is a directory; a file is written; name one in it, such as "
            f"{path / 'report.html'}"
        )
    _check_owner(Path(os.path.realpath(path)).parent, option, for_file=True)
    check_place(path.parent, option)


def _check_owner(directory: Path, option: str, *, for_file: bool) -> None:
    """Refuse a directory, or the one in which it will be made, in which another user can replace
    what is written.

    Args:
        for_file: A file is put there in one step, which is safe where everybody may make files
            but only their owners replace them, as in /tmp.
    """
    place = next(each for each in (directory, *directory.parents) if each.exists())
    found = os.stat(place)
    if not is_ours(found.st_uid):
        raise UserError(
            f"{option} {directory}: {place} belongs to user {found.st_uid}, who could replace "
            "what is written there; choose a directory of your own"
        )
    is_shared = found.st_mode & stat.S_IWOTH
    in_one_step = for_file or place != directory
    if is_shared and not (in_one_step and found.st_mode & stat.S_ISVTX):
        raise UserError(
            f"{option} {directory}: everybody may write to {place} (mode "
            f"{stat.S_IMODE(found.st_mode):o}), and so replace what is written there; choose "
            f"another directory, or correct it: chmod o-w {place}"
        )


def is_ours(owner: int) -> bool:
    """Return whether a file's owner is this user, or root, who reads and writes everything as it
    is. Where user numbers are mapped, that is the root of the container.
    """
    return owner in (os.geteuid(), 0)
