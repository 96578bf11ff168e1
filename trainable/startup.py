"""Starting a process, and ending it: what costs seconds before and after the first line of work.

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
    and Ray take, and once more when the interpreter ends. What is there when the context closes is
    left alone from then on (`gc.freeze`), so no run, whose memory is to come back, may be open.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
