"""Starting a process: what costs seconds before its first line of work.

What must not live here: what is imported.
"""

from __future__ import annotations

import gc
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
