"""End a Ray worker some seconds after its raylet has ended, unless Ray ends the worker first.

On a node that lost its network, Ray did not end it: a worker lived for minutes and kept its GPU
memory. What must not live here: an import of Ray, or what a worker does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time

_POLL_SECONDS, _GRACE_SECONDS = 2.0, 10.0
"""How often a worker checks its raylet, and how long Ray then has to end the worker itself."""


@functools.cache
def exit_with_raylet() -> None:
    """Exit after the raylet of this process; do nothing in a process that is no Ray worker."""
    pid = os.environ.get("RAY_RAYLET_PID")  # not always the parent process
    if pid is None:
        return
    import psutil  # installed with Ray

    raylet = psutil.Process(int(pid))

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while raylet.is_running() and raylet.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_POLL_SECONDS)
        time.sleep(_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="raylet", daemon=True).start()
