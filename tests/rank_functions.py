"""Functions that tests have ranks call; see `trainable.processes.local_ranks`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def describe(rank: int, place: dict[str, Any], word: str) -> dict[str, Any]:
    """Return what rank 1 was given; rank 2 fails, and rank 3 is killed."""
    if rank == 2:
        raise ValueError("bad sample 17")
    if rank == 3:
        print("about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    print("printed", flush=True)
    return {
        "place": place,
        "word": word,
        "pid": os.getpid(),
        "torch": "torch" in sys.modules,
        "own": os.environ.get("OWN"),
    }
