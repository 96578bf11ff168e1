"""Starting a process: what costs seconds before its first line of work.

Nothing heavy is imported before it is asked for. What must not live here: what a process does.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Import large packages, or run a short program, without the garbage collector.

    It looks through everything that was imported again and again: a fifth of the time that torch
    and Ray take. What is there at the end is left out of each later look, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_training() -> None:
    """Import all that trains: seconds that a process pays once."""
    if "trainable.build" in sys.modules:
        return
    with without_collection():
        import torch._dynamo  # noqa: F401  the first optimizer of a process would import it

        import trainable.build  # noqa: F401
