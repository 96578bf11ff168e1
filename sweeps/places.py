"""Directories that a user names for what a command writes: can they be written to?

What must not live here: which files are written there (`layout`, and whoever writes them).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from sweeps.spec.problems import Refused


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
        raise Refused(
            f"{option} {directory}: files cannot be written there ({error.strerror}); a "
            "directory that can be made or written to is needed; choose another, or correct its "
            "permissions"
        ) from error
    finally:
        for each in missing:  # the innermost first; one that somebody else has used stays
            with contextlib.suppress(OSError):
                each.rmdir()


def check_file(path: Path, option: str) -> None:
    """See that a file can be written, also over one that exists. See `check_place`.

    Raises:
        Refused: It cannot.
    """
    if path.is_dir():
        raise Refused(
            f"{option} {path}: is a directory; a file is written; name one in it, such as "
            f"{path / 'report.html'}"
        )
    check_place(path.parent, option)
