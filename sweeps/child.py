"""The `sweep` command as a child of a script or a notebook: `python -m sweeps.child PARENT ...`.

The kernel kills it when the process PARENT ends. What must not live here: what is started
(`api.command`), or what the command does.
"""

from __future__ import annotations

import os
import signal
import sys

from sweeps.entry import main
from trainable.process_start import end_with_parent

if __name__ == "__main__":
    parent = int(sys.argv[1])
    end_with_parent()
    if os.getppid() != parent:  # it ended before this line
        sys.exit(128 + signal.SIGKILL)
    sys.argv = ["sweep", *sys.argv[2:]]
    main()
