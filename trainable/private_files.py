"""Keep what this process and its children write from other users of the machine: umask and caches.

The command line calls `keep_files_private` for itself and all that it starts, and each process
that imports a task calls it again, because the workers of a cluster inherit nothing. What must not
live here: how a path is checked (`storage.private_directories`).
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

from trainable.errors import ConfigError
from trainable.storage.private_directories import NotPrivate, private_directory

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
