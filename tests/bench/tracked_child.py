"""The trial of P6, in a process of its own as a worker's is; prints a line for each report.

    python -m tests.bench.tracked_child EPOCHS

A line is the rows of an epoch as JSON; the last one holds `seconds`, the time of all epochs but
the first, and `p99`, the step time that one step in a hundred exceeds. What must not live here:
who reads the lines.
"""

from __future__ import annotations

import json
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
from trainable.task import Data, Task, load_task


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
    """Train, and print what a worker would report."""
    config = TrialConfig.model_validate(
        {
            "task": {"name": "digits"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": epochs},
            "checkpoint": {"every": f"{epochs} epochs"},
            "train": {"batch_size": 16},
        }
    )
    task = _Timed(load_task("digits", {"model": "mlp"}))
    with (
        tempfile.TemporaryDirectory() as directory,
        open_trainer(config, Path(directory), device="cpu", threads=1, task=task) as trainer,
    ):
        started = 0.0
        for report in trainer.events():
            print(json.dumps([tuple(row) for row in report.rows]), flush=True)
            if report.epoch == 1:
                started = time.perf_counter()
                task.steps.clear()
        seconds = time.perf_counter() - started
    p99 = statistics.quantiles(task.steps, n=100)[98]
    print(json.dumps({"seconds": seconds, "p99": p99}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
