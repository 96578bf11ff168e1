"""The trial of P6, in a process of its own as a worker's is; prints a line for each report.

    python -m tests.bench.tracked_child EPOCHS

Each line that it reads lets it train a stretch of that many epochs. A line that it prints is the
rows of an epoch as JSON. The last one of a stretch holds `seconds`, the time it took; `p99`, the
step time that one step in a hundred exceeds; and `waited`, the share of the time in which it could
have run and had no CPU, in which no other guest of the same host has a part. What must not live
here: who reads the lines.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.find_task import load_task
from trainable.task import Data, Task

_NEVER = 10**9
_NICENESS = 15
"""That of Ray's workers."""


class _Timed(Task):
    """A task that notes when each step began; an evaluation lies between two steps of no epoch."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._before: float | None = None
        self.steps: list[float] = []

    def build_model(self) -> nn.Module:
        return self._task.build_model()

    def build_data(self) -> Data:
        return self._task.build_data()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training:
            now = time.perf_counter()
            if self._before is not None:
                self.steps.append(now - self._before)
            self._before = now
        return self._task.loss(model, batch)

    def evaluate(self, model: nn.Module, batches: Any) -> Mapping[str, Any]:
        found = self._task.evaluate(model, batches)
        self._before = None
        return found


def main(epochs: int) -> None:
    """Train whenever it is told to, and print what a worker would report."""
    os.nice(_NICENESS)
    config = TrialConfig.model_validate(
        {
            "task": {"name": "digits"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": _NEVER},
            "checkpoint": {"every": f"{_NEVER} epochs"},
            "train": {"batch_size": 16},
        }
    )
    task = _Timed(load_task("digits", {"model": "mlp"}))
    with (
        tempfile.TemporaryDirectory() as directory,
        open_trainer(config, Path(directory), device="cpu", threads=1, task=task) as trainer,
    ):
        reports = trainer.events()
        for _ in sys.stdin:
            task.steps.clear()
            started, waited = time.perf_counter(), _waited()
            for report in itertools.islice(reports, epochs):
                print(json.dumps([tuple(row) for row in report.rows]), flush=True)
            seconds = time.perf_counter() - started
            p99 = statistics.quantiles(task.steps, n=100)[98]
            waited = (_waited() - waited) / seconds
            print(json.dumps({"seconds": seconds, "p99": p99, "waited": waited}), flush=True)


def _waited() -> float:
    """Seconds for which this process' main thread was ready and did not run (Linux)."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


if __name__ == "__main__":
    main(int(sys.argv[1]))
