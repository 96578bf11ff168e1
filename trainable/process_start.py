"""What a process does first: end with its parent, and import torch quickly, if it needs it.

What must not live here: what a process does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Import large packages, or run a short program, without garbage collection.

    Collections would take a fifth of the time of importing torch and Ray. Objects that exist at
    the end are exempt from later collections, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def load_training() -> None:
    """Import all modules for training, which takes seconds once in a process."""
    if "trainable.build" in sys.modules:
        return
    with without_collection():
        import torch._dynamo  # noqa: F401  else the first optimizer of a process imports it

        importlib.import_module("trainable.build")  # by name: it imports this module
        importlib.import_module("trainable.group_joining").find_backend()


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
