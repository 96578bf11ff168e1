"""The entry point of the `sweep` command.

It takes the working directory off the import path, and exits without a traceback if Ctrl-C comes
while the command loads. What must not live here: any import that takes time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys


def main() -> None:
    """Load and run the command line."""
    _keep_directory_off_path()
    from trainable.heartbeat import DUMP_STACKS

    # on this signal, write the stacks of all threads to standard error, and go on
    faulthandler.register(DUMP_STACKS, file=2, all_threads=True)
    try:
        os.environ.setdefault("PYTHONHASHSEED", "0")  # for children; see `needs_hash_order`
        from trainable.lazy_imports import without_collection

        with without_collection():
            from sweeps.cli import main as run
        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _keep_directory_off_path() -> None:
    """Remove the working directory from the import path of this process and its children.

    It may hold a `json.py` or `sitecustomize.py` of any user. Python puts it first for `-m`, `-c`
    and empty entries of PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:/code` leaves one if the variable
    was empty. Directories that PYTHONPATH names stay, also as a dot. `trainable.task_import`
    appends the working directory when it imports a task.
    """
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if named:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
    else:
        os.environ.pop("PYTHONPATH", None)
    with contextlib.suppress(OSError):  # the working directory was removed
        here = os.getcwd()
        ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        if here not in (ours, *map(os.path.abspath, named)):
            sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]
    from trainable.task_import import SAFE_PATH, SAFE_PATH_VARIABLE

    os.environ.setdefault(SAFE_PATH_VARIABLE, SAFE_PATH)


if __name__ == "__main__":
    main()
