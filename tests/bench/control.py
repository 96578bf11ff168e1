"""P8: what a trial costs the driver, when there are few and when there are many.

The trials are a loop of the user's own that does nothing, or sleeps. What must not live here:
whole sweeps against other ways of making them (`sweeping.py`).
"""

from __future__ import annotations

import bisect
import datetime
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psutil

from sweeps.engine.resources import usable_cpus
from tests.bench.table import Goal, Result, alone, paired, size

_SWEEP = Path(sys.executable).with_name("sweep")
_LOGICAL_CPUS = 16
"""As many trials at a time as in Ray's published 715 s for an ideal 625 s."""

_TASK = """
import time


def run(config, context):
    config.train.schedule.warmup, config.train.clip.max_norm  # a loop reads what is searched
    for _ in context.remaining_epochs():
        time.sleep(config.task.arguments["seconds"])
        yield {"val/loss": config.train.optimizer.lr}
"""
_SPEC = """
name: bench
task: {{name: "noop:run", seconds: {seconds}}}
metric: val/loss
mode: min
trials: {trials}
budget: {{epochs: 1}}
space:
  train.optimizer.lr: {{loguniform: [1.0e-4, 1.0e-1]}}
  train.schedule.warmup: {{uniform: [0.0, 0.3]}}
  train.clip.max_norm: {{loguniform: [0.1, 10]}}
search: {{sampler: {sampler}}}
early_stopping: {{scheduler: none}}
resources: {{cpu: {cpu}}}
"""


class _Sweep(NamedTuple):
    started: list[float]
    """When each trial was created, in seconds since the epoch, in order."""
    ended: list[float]
    memory: list[tuple[float, int]]
    """When it was looked at, and the driver's resident bytes."""

    def cost(self, count: int) -> float:
        """Milliseconds from one trial's end to the next, around the `count`-th."""
        some = count // 2
        return 1e3 * (self.ended[count - 1] - self.ended[count - some - 1]) / some

    def resident(self, count: int) -> int:
        """The driver's bytes when the `count`-th trial ended."""
        at = bisect.bisect(self.memory, (self.ended[count - 1], 0))
        return self.memory[min(at, len(self.memory) - 1)][1]


def plane(repeats: int) -> list[Result]:
    """A trial that does nothing: its cost and the driver's memory, at the end and at a tenth."""
    many = size(10_000, 40)
    few = many // 10
    results = []
    for sampler, goal in (("random", Goal("ratio", 1.2)), ("tpe", None)):
        taken = [
            _run(many, sampler=sampler, seconds=0.0, at_once=usable_cpus()) for _ in range(repeats)
        ]
        late, early = ([sweep.cost(count) for sweep in taken] for count in (many, few))
        row = f"P8 cost of a trial, {sampler}, at {many:,} / at {few:,}"
        results.append(paired(row, late, early, "ms", goal))
        grown = [(s.resident(many) - s.resident(few)) / (many - few) / 1024 for s in taken]
        row = f"P8 driver's memory for each trial, {sampler}"
        results.append(alone(row, grown, "KiB", Goal("ours", 20)))
    return results


def sleepers(repeats: int) -> list[Result]:
    """Trials of one second, from the first one's start to the last one's end, against the ideal
    of as many at a time as there are logical CPUs.
    """
    trials = size(10_000, 32)
    ideal = trials / _LOGICAL_CPUS
    taken = []
    for _ in range(repeats):
        sweep = _run(trials, sampler="random", seconds=1.0, at_once=_LOGICAL_CPUS)
        taken.append(sweep.ended[-1] - sweep.started[0])
    row = f"P8 {trials:,} trials of 1 s, {_LOGICAL_CPUS} at a time / the ideal"
    return [paired(row, taken, [ideal] * repeats, "s", Goal("ratio", 1.10))]


def _run(trials: int, *, sampler: str, seconds: float, at_once: int) -> _Sweep:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "noop.py").write_text(_TASK)
        Path(directory, "bench.yaml").write_text(
            _SPEC.format(
                trials=trials, sampler=sampler, seconds=seconds, cpu=usable_cpus() / at_once
            )
        )
        command = [str(_SWEEP), "run", "bench.yaml", "--root", "."]
        with open(Path(directory, "said"), "w+", encoding="utf-8") as said:
            driver = psutil.Popen(command, cwd=directory, stdout=said, stderr=subprocess.STDOUT)
            memory = []
            while driver.poll() is None:
                if driver.status() != psutil.STATUS_ZOMBIE:
                    memory.append((time.time(), driver.memory_info().rss))
                time.sleep(0.2)
            said.seek(0)
            assert driver.returncode == 0, said.read()[-2000:]
        with closing(sqlite3.connect(Path(directory, "bench", "ledger.db"))) as db:
            times = db.execute("SELECT datetime_start, datetime_complete FROM trials").fetchall()
        assert len(times) == trials
        started, ended = (sorted(map(_seconds, column)) for column in zip(*times, strict=True))
        return _Sweep(started, ended, memory)


def _seconds(stored: str) -> float:
    return datetime.datetime.fromisoformat(stored).timestamp()  # Optuna stores local time
