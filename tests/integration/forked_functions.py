"""What the processes of `test_attempt_process.py` call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from trainable.processes import attempt_process


def report(connection: Connection, name: str, *does: str) -> None:
    """Import a module as a task, leave marks on it, send what was found, and do more."""

    def load() -> bool:
        __import__(name)
        return True

    first = name not in sys.modules
    attempt_process.import_task(connection, name, load)
    module = sys.modules[name]
    found: dict[str, Any] = {
        "marked": list(module.MARKED),
        "imports": first,
        "imported by": module.PID,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "random": int.from_bytes(os.urandom(4)),
        "threads": threading.active_count(),
    }
    module.MARKED.append(1)
    connection.send(found)
    if "daemon" in does:  # in another session, with this process' connection
        left = subprocess.Popen(
            [sys.executable, "-c", "import os, time\nif not os.fork(): time.sleep(600)"],
            start_new_session=True,
            pass_fds=[connection.fileno()],
        )
        left.wait()
    if "kill" in does:
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit" in does:
        os._exit(7)
    if "stay" in does:
        time.sleep(600)
