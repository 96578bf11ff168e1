"""Set USER and HOME if the system has no account for this user.

In a container, a user ID often has no entry in the password database and no HOME. Ray, torch,
matplotlib and MLflow need both. What must not live here: imports that take time.
"""

from __future__ import annotations

import os
import pwd
import stat

_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""The variables that `getpass.getuser` reads before it uses the password database."""


def complete_account() -> None:
    """Set USER and HOME for this process and its children if they and the account are missing."""
    try:
        pwd.getpwuid(os.getuid())
        return
    except KeyError:
        pass
    if not any(os.environ.get(name) for name in _NAMES):
        os.environ["USER"] = f"uid{os.getuid()}"
    if not os.environ.get("HOME") and (home := _temporary_home()):
        os.environ["HOME"] = home


def _temporary_home() -> str | None:
    import tempfile

    try:
        home = os.path.join(tempfile.gettempdir(), f"gradsweep-home-{os.getuid()}")
        os.makedirs(home, mode=0o700, exist_ok=True)
        found = os.lstat(home)
    except OSError:  # code that needs HOME reports the error
        return None
    # Another user may have created a directory or link of that name.
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return home if ours and not found.st_mode & 0o022 else None
