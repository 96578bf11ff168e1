"""Keep what this process and its children write from other users of the machine: umask and caches.

The command line calls `keep_files_private` for itself and all that it starts, and each process
that imports a task calls it again, because the workers of a cluster inherit nothing. A path to a
file is checked here, too. What must not live here: what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainable.errors import ConfigError

UMASK_VARIABLE = "SWEEP_UMASK"
"""The environment variable with the umask, in octal, for users who share the files of sweeps."""
_UMASK = 0o077
_ALWAYS = 0o002
"""No file is ever writable by everybody."""

_IN_TEMPORARY = {"TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables with the caches of libraries which default to a predictable name in the system's
temporary directory: whoever creates it first provides the code that is run from it."""
_IN_HOME = {
    "XDG_CACHE_HOME": "xdg",  # fontconfig, Matplotlib's fonts, torch.hub, torch's extensions
    "MPLCONFIGDIR": "matplotlib",
    "TRITON_HOME": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
}
"""The same for libraries which default to the home directory; set only if that is not private."""
_ELSEWHERE = ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "PYTHONPYCACHEPREFIX")
"""Variables of the user with further directories that code is run from. Their defaults are below
those above, or beside the code."""


def keep_files_private() -> None:
    """Set the umask and the cache directories of this process and its children."""
    text = os.environ.get(UMASK_VARIABLE) or f"{_UMASK:o}"
    if not re.fullmatch(r"0?o?[0-7]{1,3}", text):
        raise ConfigError(
            f"{text!r} is no umask; it is the octal number of the permissions that new files do "
            "not get; write 027 to let your group read the files of sweeps",
            key=UMASK_VARIABLE,
        )
    os.umask(int(text.replace("o", ""), 8) | _ALWAYS)
    set_cache_directories()


def set_cache_directories() -> None:
    """Have libraries keep their caches and temporary files where no other user can put a file.

    They run what they find there. A variable that the user has set stays, if its directory is
    private. TMPDIR is replaced by a directory below it if it is not, or in the user's cache.
    """
    home = os.path.expanduser("~")
    wanted = _IN_TEMPORARY | ({} if _is_private(home) else _IN_HOME)
    for name in (*_IN_HOME, *_IN_TEMPORARY, *_ELSEWHERE):
        if value := os.environ.get(name):
            _check(name, value)
    missing = [name for name in wanted if not os.environ.get(name)]
    with contextlib.suppress(OSError):  # no file can be written, by the libraries neither
        temporary = tempfile.gettempdir()
        is_shared = not _is_private(temporary)
        if missing or is_shared:
            base = _own_cache(home)
            os.environ.update({name: str(base / wanted[name]) for name in missing})
            if is_shared:
                os.environ["TMPDIR"] = tempfile.tempdir = _own_temporary(base, temporary)


def _own_temporary(base: Path, shared: str) -> str:
    """Return this user's own directory for temporary files on this machine.

    It has a random name, which a link in the directory of all caches remembers. Some libraries
    have no variable for their predictable names in the temporary directory: torch keeps compiled
    headers there, wherever its cache is.
    """
    try:
        private_directory(shared, trust_groups=False, sticky=True)
    except NotPrivate:
        shared = str(base)
    link = base / f"tmp-{os.uname().nodename}"
    # Not private: another user has taken the name since the system removed the directory.
    with contextlib.suppress(NotPrivate, OSError):
        found = private_directory(link, trust_groups=False)
        if found.is_dir() and found.parent == Path(os.path.realpath(shared)):
            return str(found)
    new = tempfile.mkdtemp(prefix="sweep-tmp-", dir=shared)
    aside = link.with_name(f"{link.name}.{os.getpid()}")
    os.symlink(new, aside)
    aside.replace(link)
    return new


def _own_cache(home: str) -> Path:
    """Return the directory of all caches."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if os.path.isabs(cache):  # a user without an account may have no home
        with contextlib.suppress(NotPrivate, OSError):
            return _created(Path(cache, "gradsweep"))
    try:
        return _created(Path(tempfile.gettempdir(), f"gradsweep-cache-{os.getuid()}"))
    except NotPrivate as error:
        raise NotPrivate(
            f"caches of compiled code: {error}; or set XDG_CACHE_HOME to a directory of your own"
        ) from error


def _created(place: Path) -> Path:
    found = private_directory(place, create=True, mode=0o700, trust_groups=False)
    if not os.access(found, os.W_OK | os.X_OK):
        raise PermissionError(f"{found} is not writable")
    return found


def _is_private(directory: str) -> bool:
    if not os.path.isabs(directory):
        return False
    try:
        private_directory(directory, trust_groups=False)
    except (NotPrivate, OSError):
        return False
    return True


def _check(name: str, directory: str) -> None:
    try:
        private_directory(directory, trust_groups=False)
    except NotPrivate as error:
        raise NotPrivate(
            f"{name}={directory}: {error}; code is run from it; or unset {name}"
        ) from error
    except OSError:
        pass  # it cannot be used by anybody


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
    """Return the real path of a directory, which no user but this one and root can replace."""
    place, opened = _open(
        directory, create=create, mode=mode, trust_groups=trust_groups, sticky=sticky
    )
    os.close(opened)
    return place


@contextlib.contextmanager
def opened_directory(directory: str | os.PathLike[str]) -> Iterator[tuple[Path, int]]:
    """Open or create a directory, also /tmp, where no other user can replace this user's files."""
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
        _check_directory(
            place, os.fstat(current), trust_groups=trust_groups, links_only=links_only
        )
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
    """Return whether a file's owner is this user or root, who may access every file anyway."""
    return owner in (os.geteuid(), 0)  # with mapped user ids, the root of the container


def _check_directory(
    place: Path, found: os.stat_result, *, trust_groups: bool, links_only: bool
) -> None:
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
