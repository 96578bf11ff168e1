"""P13: the least that two processes need for what two ranks exchange and save in a short trial:

    torchrun --standalone --nproc-per-node 2 -m tests.bench.ranks_floor TRIALS

Prints the median seconds of a trial. What must not live here: anything of ours.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

EXCHANGES = 11
"""Of a trial of two steps with one report: three at the start, two steps, six at the report."""
_MESSAGE_BYTES = 4096
_STATE_BYTES = 32_768


def main(trials: int) -> None:
    """Exchange messages and save a file in each trial; the first rank alone saves."""
    dist.init_process_group("gloo")
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    found = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(trials):
            started = time.perf_counter()
            for _ in range(EXCHANGES):
                dist.all_gather(found, message)
            if dist.get_rank() == 0:
                _save(Path(directory))
            seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(statistics.median(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _save(directory: Path) -> None:
    """Write two files as a checkpoint is written: aside, synced, renamed."""
    for name, size in (("state", _STATE_BYTES), ("manifest", 1024)):
        with (directory / f".{name}").open("wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
        (directory / f".{name}").replace(directory / name)
    parent = os.open(directory, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


if __name__ == "__main__":
    main(int(sys.argv[1]))
