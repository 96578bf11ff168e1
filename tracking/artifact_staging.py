"""Staging: copies of files that wait for the tracking server, on the disk before they are queued.

Each lies in a directory of its own, under its own name: a server names what it stores after the
file. What must not live here: when a copy is taken or delivered (`outbox`, `delivery`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

from tracking.recorder import check_artifact_name

_DIRECTORY = "artifacts"


class Staging:
    """The copies in an outbox.

    Args:
        outbox: The outbox's directory.
    """

    def __init__(self, outbox: Path) -> None:
        self._outbox = outbox
        self._directory = outbox / _DIRECTORY

    def copy(self, path: Path, name: str) -> dict[str, str]:
        """Copy a file, and wait until the disk has it.

        Args:
            name: What it is to be called at the server, with its folder.

        Returns:
            What a record says of it: where the copy lies, and its folder at the server.

        Raises:
            ValueError: `name` is not a relative path.
            OSError: It could not be copied; nothing is left.
        """
        target = check_artifact_name(name)
        copy = self._directory / uuid.uuid4().hex / target.name
        copy.parent.mkdir(parents=True)
        try:
            with os.fdopen(_open(path), "rb") as source, copy.open("xb") as file:
                shutil.copyfileobj(source, file)
            for each in (copy, copy.parent, self._directory, self._outbox):
                sync_path(each)
        except BaseException:  # also an interruption leaves nothing behind; raised again
            shutil.rmtree(copy.parent, ignore_errors=True)
            raise
        folder = "" if str(target.parent) == "." else str(target.parent)
        return {"staged": str(copy.relative_to(self._outbox)), "folder": folder}

    def find(self, staged: str) -> Path:
        """Return where a copy lies.

        Args:
            staged: What its record says of that. A record can be planted, as can a link.

        Raises:
            ValueError: It is no place of a copy, a symbolic link leads elsewhere, or there is no
                regular file.
        """
        parts = PurePath(staged).parts
        if len(parts) != 3 or parts[0] != _DIRECTORY or ".." in parts:
            raise ValueError(
                f"{staged!a} is no copy of a file: copies lie in {self._directory}, each in "
                "a directory of its own; nothing else is sent or removed"
            )
        copy = self._outbox / staged
        for link in (self._directory, copy.parent):
            if link.is_symlink():
                raise ValueError(
                    f"{link} is a symbolic link, and copies lie in directories: nothing else is "
                    "sent or removed; see who put it there, and remove it"
                )
        try:
            is_file = stat.S_ISREG(copy.lstat().st_mode)
        except OSError as error:
            raise ValueError(
                f"the staged artifact {copy} is missing ({error.strerror})"
            ) from error
        if not is_file:
            raise ValueError(
                f"the staged artifact {copy} is no regular file, and nothing else is sent"
            )
        return copy

    def remove(self, payload: Mapping[str, str]) -> None:
        """Remove a copy; one that is not there is no error."""
        with contextlib.suppress(ValueError):
            shutil.rmtree(self.find(payload["staged"]).parent, ignore_errors=True)

    def keep_only(self, payloads: Iterable[Mapping[str, str]]) -> None:
        """Remove copies whose record was never committed, or whose removal was cut short.

        Where a symbolic link leads there, they stay: it may lead to anything.
        """
        if self._outbox.is_symlink() or self._directory.is_symlink():
            return
        if not self._directory.is_dir():
            return
        kept = {PurePath(payload["staged"]).parent.name for payload in payloads}
        for directory in self._directory.iterdir():
            if directory.name not in kept:
                shutil.rmtree(directory, ignore_errors=True)


def _open(path: Path) -> int:
    """Open a regular file to be read, neither through a link nor waiting for who writes a FIFO."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            f"{path} is a symbolic link, and only files themselves are tracked; put a copy of the "
            "file there"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no regular file, and only such are tracked; remove it")
    return file


def sync_path(path: Path) -> None:
    """Wait until a file's content, or what a directory lists, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
