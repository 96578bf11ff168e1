"""Where the `sweep` command begins: who interrupts it while it is loaded is shown no traceback.

What must not live here: any import that takes time.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Load the command line and run it; an interruption before any command began is no error."""
    try:
        from sweeps.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
