"""Where the `sweep` command begins: who interrupts it while it is loaded is shown no traceback.

What must not live here: any import that takes time.
"""

from __future__ import annotations

import os
import signal
import sys

_HASH_SEED = "PYTHONHASHSEED"


def main() -> None:
    """Load the command line and run it; an interruption before any command began is no error."""
    _fix_hash_order()
    try:
        from sweeps.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


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
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
