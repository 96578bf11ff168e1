"""Import torch and other large packages quickly, and only when a process needs them.

What must not live here: what a process does.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Import large packages, or run a short program, without garbage collection.

    Collections would take a fifth of the time of importing torch and Ray. Objects that exist at
    the end are exempt from later collections, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_training() -> None:
    """Import all modules for training, which takes seconds once in a process."""
    if "trainable.build" in sys.modules:
        return
    with without_collection():
        import torch._dynamo  # noqa: F401  else the first optimizer of a process imports it

        importlib.import_module("trainable.build")  # by name: it imports this module
