"""End a command's process although something that a task left would hold it up.

Python waits at its exit for threads, for processes of `multiprocessing` and for functions of
`atexit`, without a limit and without a word. What must not live here: any command.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess

from rich.console import Console

_SECONDS = 5.0
"""How long what a task left may take."""


def limit_exit(err: Console, code: int) -> None:
    """Exit after some seconds, with the reason, if Python has not exited until then.

    Args:
        err: Receives the reason.
        code: The exit code.
    """

    def end() -> None:
        time.sleep(_SECONDS)
        try:
            children = multiprocessing.active_children()
            with suppress(OSError):  # standard error may be a file on a full disk
                err.print(_sentence(children), style="yellow", soft_wrap=True)
            for child in children:
                child.kill()
        finally:
            os._exit(code)

    threading.Thread(target=end, name="exit", daemon=True).start()


def _sentence(children: Sequence[BaseProcess]) -> str:
    threads = [
        f"thread {each.name!r}"
        for each in threading.enumerate()
        if not each.daemon and each is not threading.main_thread()
    ]
    processes = [f"process {each.pid}" for each in children if not each.daemon]
    found = ", ".join([*threads, *processes]) or "a function of atexit"
    return (
        f"the task left {found} running; a command waits {_SECONDS:g} s for that and then ends "
        "it; let the task end what it starts, or start threads and processes with daemon=True"
    )
