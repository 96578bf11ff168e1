"""The entry point of the `sweep` command.

It takes the working directory off the import path, and ends without a traceback at an early
Ctrl-C. With `python -m sweeps.entry --child-of PARENT ...`, the kernel kills it when the process
PARENT, a script or a notebook, ends. What must not live here: any import that takes time.
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
    from trainable.watch.heartbeat import DUMP_STACKS

    # on this signal, write the stacks of all threads to standard error, and go on
    faulthandler.register(DUMP_STACKS, file=2, all_threads=True)
    try:
        os.environ.setdefault("PYTHONHASHSEED", "0")  # for children; see `needs_hash_order`
        from trainable.process_start import without_collection

        with without_collection():
            from sweeps.cli.app import main as run
        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _keep_directory_off_path() -> None:
    """Remove the working directory from the import path of this process and its children.

    It may hold any user's `json.py` or `sitecustomize.py`. Python puts it first for `-m`, `-c`,
    a dot or an empty entry in PYTHONPATH: `PYTHONPATH=$PYTHONPATH:/code` has one if it was empty.
    Absolute entries stay, and relative ones that nobody else can write to, as absolute paths.
    `trainable.user_code.task_import` appends the working directory when it imports a task.
    """
    with contextlib.suppress(OSError):  # the working directory was removed
        here = os.getcwd()
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        kept = {ours, *map(os.path.abspath, filter(os.path.isabs, entries))}
        found, relative = list(sys.path), {"", here, *map(os.path.abspath, entries)}
        # First of all: the next line imports.
        sys.path[:] = [path for path in found if path not in relative - kept]
        named = [path for entry in entries if (path := _named_directory(entry, here))]
        sys.path[:] = [path for path in found if path not in relative - kept - {*named}]
        if named:
            os.environ["PYTHONPATH"] = os.pathsep.join(named)
        else:
            os.environ.pop("PYTHONPATH", None)
    from trainable.user_code.task_import import SAFE_PATH, SAFE_PATH_VARIABLE

    os.environ.setdefault(SAFE_PATH_VARIABLE, SAFE_PATH)


def _named_directory(entry: str, here: str) -> str | None:
    """Return an entry of PYTHONPATH as an absolute path; None if it is left out."""
    from trainable.store.private_files import NotPrivate, private_directory

    if os.path.isabs(entry):
        return entry
    path = os.path.abspath(entry)
    try:
        private_directory(path)
    except (NotPrivate, OSError) as error:
        if "PYTHONPATH" in os.environ:
            print(f"PYTHONPATH: the entry '{entry}' is left out: {error}", file=sys.stderr)
        return None
    return None if path == here else path


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    from trainable.process_start import end_with_parent

    end_with_parent()
    if os.getppid() != parent:  # it ended before this line
        sys.exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child-of"]:
        _end_with(int(sys.argv[2]))
        sys.argv[:3] = ["sweep"]
    main()
