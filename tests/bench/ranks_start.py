"""P13: how soon a trial of two ranks starts in a running sweep, against one of one process.

Trials train almost nothing, one at a time. The first ones start the workers; the later ones reuse
them, and the time from one result to the next is that of a start. A second line is what
two bare processes need for as many exchanges (`ranks_floor.py`).
What must not live here: how long a step takes (`ranks.py`).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from tests.bench import ranks_floor
from tests.bench.ranks_problems import RANKS
from tests.bench.table import Goal, Result, alone, paired, size

_SWEEP = Path(sys.executable).with_name("sweep")
_SPEC = """
name: starts
task: {name: spiral, samples: 40}
metric: val/loss
mode: min
concurrency: 1
budget: {epochs: 1}
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
search: {sampler: random}
"""
_FIRST = 4
"""Trials that are not counted."""


def starts(repeats: int) -> list[Result]:
    """Sweeps of both kinds, in turn."""
    trials = size(14, 8)
    found: dict[int, list[float]] = {1: [], RANKS: []}
    least = []
    for _ in range(repeats):
        for workers, taken in found.items():
            taken.append(_seconds(workers, trials))
        least.append(_least_seconds())
    row = f"P13 start of a trial of {RANKS} ranks / of one process"
    return [
        paired(row, found[RANKS], found[1], "s/trial", Goal("ratio", 1.3)),
        alone("P13 exchanges and a save of such a trial in two bare processes", least, "s/trial"),
    ]


def _least_seconds() -> float:
    """Return the median seconds of what two ranks exchange and save, in two bare processes."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*run, str(RANKS), "-m", ranks_floor.__name__, "50"]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _seconds(workers: int, trials: int) -> float:
    """Return the median seconds from one trial's result to the next one's."""
    with tempfile.TemporaryDirectory(prefix="starts-") as root:
        spec = Path(root, "starts.yaml")
        spec.write_text(
            f"{_SPEC}trials: {trials}\nresources: {{workers: {workers}, cpu: 1, gpu: 0}}\n"
        )
        command = [str(_SWEEP), "run", str(spec), "--root", root]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            ends = [
                time.perf_counter()
                for line in process.stdout
                if line.startswith("trial ") and " epoch 1/" in line
            ]
        assert process.returncode == 0
    assert len(ends) == trials, f"{len(ends)} of {trials} trials reported"
    return statistics.median(b - a for a, b in pairwise(ends[_FIRST:]))
