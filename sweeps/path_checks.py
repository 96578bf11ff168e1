"""Check directories that a user names for output: writable, and safe from other users.

What must not live here: which files are written there (`paths`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from sweeps.errors import UserError
from trainable.storage.private_directories import NotPrivate, is_ours, private_directory


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
    _private(directory, option)
    check_writable(directory, option)


def make_private(directory: Path, option: str) -> Path:
    """Create a directory, which may exist, and return its real path.

    Checked again, because it may have been missing when `check_private` was called.

    Raises:
        UserError: Another user could replace what is written there, or it cannot be created.
    """
    return _private(directory, option, create=True)


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
    # Renamed into place, which is safe in directories such as /tmp.
    _private(path.parent, option, sticky=True)
    _private(Path(os.path.realpath(path)).parent, option, sticky=True)
    check_writable(path.parent, option)


def _private(directory: Path, option: str, *, create: bool = False, sticky: bool = False) -> Path:
    """Call `private_directory`, and name the option in its errors.

    Raises:
        UserError: Another user could replace what is written to the directory.
    """
    try:
        return private_directory(directory, create=create, sticky=sticky)
    except NotPrivate as error:
        raise UserError(f"{option} {directory}: {error}") from error
    except OSError as error:
        raise UserError(
            f"{option} {directory}: {error.strerror} ({error.filename}); the option names a "
            "directory, which is created when it is missing; choose another, or correct its "
            "permissions"
        ) from error
