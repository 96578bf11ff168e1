"""End a process with its parent, however the parent ends; adopt what a descendant leaves.

What must not live here: processes that are ended by anything else (`sweeps.engine`).
"""

from __future__ import annotations

import ctypes
import signal
import sys

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER


def end_with_parent(sent: signal.Signals = signal.SIGKILL) -> bool:
    """Make the kernel send this process a signal when the thread that started it ends.

    A parent that ended before this call is not noticed: then `os.getppid()` is another process.
    """
    if sys.platform != "linux":
        return False
    refused: int = ctypes.CDLL(None).prctl(_DEATH_SIGNAL, sent)
    return refused == 0


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(_ADOPT, 1)
