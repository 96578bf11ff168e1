"""Where the `sweep` command begins: neither it nor its children import from the working directory,
and who interrupts it while it is loaded is shown no traceback.

What must not live here: any import that takes time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

_HASH_SEED = "PYTHONHASHSEED"


def main() -> None:
    """Load the command line and run it; an interruption before any command began is no error."""
    _keep_directory_off_path()
    try:
        _fix_hash_order()
        from sweeps.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _keep_directory_off_path() -> None:
    """Take the working directory off the import path of this process and of its children.

    Anybody may have left a `json.py` or `sitecustomize.py` there. Python puts the directory first
    for `-m` and `-c`, and for an empty entry of PYTHONPATH, which is what
    `PYTHONPATH=$PYTHONPATH:/code` leaves where there was none. A directory that PYTHONPATH names,
    be it with a dot, stays. `trainable.task_import` appends the directory where a task is
    imported.
    """
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if named:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
    else:
        os.environ.pop("PYTHONPATH", None)
    with contextlib.suppress(OSError):  # a directory that is gone holds no modules
        here = os.getcwd()
        ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        if here not in (ours, *map(os.path.abspath, named)):
            sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]
    from trainable.task_import import SAFE_PATH, SAFE_PATH_VARIABLE

    os.environ.setdefault(SAFE_PATH_VARIABLE, SAFE_PATH)


def _fix_hash_order() -> None:
    """Give strings the same hash in every process that imports a task, unless the user has chosen.

    Children inherit it; a process settles it when it starts, so `train`, which imports the task
    itself, begins once more, but not under a debugger, which would be left behind.
    """
    if _HASH_SEED in os.environ:
        return
    os.environ[_HASH_SEED] = "0"
    debugged = sys.gettrace() is not None or "pydevd" in sys.modules
    if sys.argv[1:2] == ["train"] and not debugged:
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
