"""Find or create a directory in which no other user can replace a file.

It suffices that the directory itself is the user's: a user who can write to one of its parents can
move it away and put another one in its place. So each component of the path is opened by itself,
relative to the one before, without following links. A path that was found to be private stays so,
because nobody else can rename a part of it. What must not live here: what is written there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC
"""O_PATH also opens a directory that may be entered but not read."""
_MOST_LINKS = 40
"""As many symbolic links as Linux follows in one path."""


class NotPrivate(ValueError):
    """Another user could replace what is written to a directory."""


def private_directory(
    directory: str | os.PathLike[str],
    *,
    create: bool = False,
    mode: int = 0o777,
    trust_groups: bool = True,
    sticky: bool = False,
) -> Path:
    """Return the real path of a directory, which no user but this one and root can replace.

    Symbolic links of this user and root are followed.
    """
    place, opened = _open(
        directory, create=create, mode=mode, trust_groups=trust_groups, sticky=sticky
    )
    os.close(opened)
    return place


@contextlib.contextmanager
def opened_directory(directory: str | os.PathLike[str]) -> Iterator[tuple[Path, int]]:
    """Open a directory in which no other user can replace a file of this user, and create it.

    Directories such as /tmp are among them.
    """
    place, opened = _open(directory, create=True, sticky=True)
    try:
        yield place, opened
    finally:
        os.close(opened)


def check_links(directory: str | os.PathLike[str]) -> None:
    """Check that no link of another user leads to a directory, which may not exist yet."""
    os.close(_open(directory, links_only=True)[1])


def _open(
    directory: str | os.PathLike[str],
    *,
    create: bool = False,
    mode: int = 0o777,
    trust_groups: bool = True,
    sticky: bool = False,
    links_only: bool = False,
) -> tuple[Path, int]:
    """Return the real path, and a descriptor of the directory, or of its deepest parent."""
    names = [*Path(os.path.abspath(directory)).parts[:0:-1]]
    place, links = Path("/"), 0
    current = os.open("/", _FLAGS | os.O_DIRECTORY)
    try:
        _check_directory(place, os.fstat(current), trust_groups=trust_groups, links_only=links_only)
        while names:
            name = names.pop()
            try:
                deeper = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=current)
            except FileNotFoundError:
                if not create:
                    return place.joinpath(name, *reversed(names)), current
                with contextlib.suppress(FileExistsError):  # it appeared, and is checked below
                    os.mkdir(name, mode, dir_fd=current)
                names.append(name)
                continue
            found = os.fstat(deeper)
            if stat.S_ISLNK(found.st_mode):
                try:
                    _check_owner(place / name, found)
                    target = os.readlink("", dir_fd=deeper)
                finally:
                    os.close(deeper)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place / name))
                if target.startswith("/"):
                    deeper, place = os.open("/", _FLAGS | os.O_DIRECTORY), Path("/")
                    os.close(current)
                    current = deeper
                names += [part for part in reversed(target.split("/")) if part not in ("", ".")]
                continue
            os.close(current)
            current = deeper
            place = place.parent if name == ".." else place / name
            _check_directory(place, found, trust_groups=trust_groups, links_only=links_only)
        found, checked = os.fstat(current), not (sticky or links_only)
        if checked and (who := _open_to(found, trust_groups=trust_groups)):
            raise _is_open(place, found, who)
    except BaseException:  # the descriptor is closed; raised again
        os.close(current)
        raise
    return place, current


def is_ours(owner: int) -> bool:
    """Return whether a file's owner is this user or root, who may access every file anyway.

    With mapped user ids, root is the root of the container.
    """
    return owner in (os.geteuid(), 0)


def _check_directory(place: Path, found: os.stat_result, *, trust_groups: bool, links_only: bool) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    if links_only:
        return
    _check_owner(place, found)
    who = _open_to(found, trust_groups=trust_groups)
    if who and not found.st_mode & stat.S_ISVTX:
        raise _is_open(place, found, who)


def _check_owner(place: Path, found: os.stat_result) -> None:
    # Where user ids are mapped, the system's root may be shown as another user: who owns `/`.
    if is_ours(found.st_uid) or found.st_uid == os.stat("/").st_uid:
        return
    if stat.S_ISLNK(found.st_mode):
        raise NotPrivate(
            f"{place} is a symbolic link that belongs to user {found.st_uid}; only your own links "
            "are followed; remove it, or choose another place"
        )
    raise NotPrivate(
        f"{place} belongs to user {found.st_uid}, who could replace your files there; choose a "
        "directory of your own"
    )


def _open_to(found: os.stat_result, *, trust_groups: bool) -> str:
    """Return who else may write to a directory; empty: nobody."""
    if found.st_mode & stat.S_IWOTH:
        return "every user"
    # By convention, the group that consists of one user has that user's id.
    trusted = trust_groups or found.st_gid in (0, os.geteuid())
    return f"group {found.st_gid}" if found.st_mode & stat.S_IWGRP and not trusted else ""


def _is_open(place: Path, found: os.stat_result, who: str) -> NotPrivate:
    whose = "o" if found.st_mode & stat.S_IWOTH else "g"
    return NotPrivate(
        f"{who} may write to {place} (mode {stat.S_IMODE(found.st_mode):o}), and so replace your "
        f"files there; choose another directory, or correct it: chmod {whose}-w {place}"
    )
