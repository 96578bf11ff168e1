"""P4: how much slower a run trains that saves a checkpoint every second.

What must not live here: how a checkpoint is written, or what a step costs (`steps.py`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.bench.table import Goal, Result, interleave
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.task import Data, Task, load_task

_PEER = "no checkpoint"
_GOAL = {_PEER: Goal("ratio", 1.01)}
# A state of 200 MB: AdamW keeps two moments beside each of 17 million parameters.
_WIDTH, _LAYERS = 2048, 4
_EPOCHS_OF_CNN, _EPOCHS_OF_LARGE = 600, 4
_REPEATS_OF_LARGE = 5


class _Large(Task):
    """Wide layers on few samples: there is much to save for each second of training."""

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
        return nn.Sequential(*layers, nn.Linear(_WIDTH, 10))

    def build_data(self) -> Data:
        inputs, targets = torch.randn(512, _WIDTH), torch.randint(10, (512,))
        return Data(train=(inputs, targets), val=(inputs[:16], targets[:16]))


class _Unrated(Task):
    """The same task with a metric that never gets better: only the interval saves."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def build_model(self) -> nn.Module:
        return self._task.build_model()

    def build_data(self) -> Data:
        return self._task.build_data()

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:  # noqa: ARG002
        return {"loss": 1.0}


def checkpoints(repeats: int) -> list[Result]:
    """Seconds of training with a checkpoint each second, and with none between its ends."""
    cnn = lambda: load_task("digits", {"model": "cnn"})  # noqa: E731
    return [
        *_compare("P4 digits CNN", cnn, _EPOCHS_OF_CNN, 64, repeats),
        *_compare("P4 state of 200 MB", _Large, _EPOCHS_OF_LARGE, 32, _REPEATS_OF_LARGE),
    ]


def _compare(
    row: str, make: Callable[[], Task], epochs: int, batch_size: int, repeats: int
) -> list[Result]:
    return interleave(
        f"{row}, a checkpoint each second",
        lambda: _train(_Unrated(make()), epochs, batch_size, "1 second"),
        {_PEER: lambda: _train(_Unrated(make()), epochs, batch_size, f"{10**9} steps")},
        unit="s",
        goals=_GOAL,
        repeats=repeats,
    )


def _train(task: Task, epochs: int, batch_size: int, every: str) -> float:
    """Return the seconds from the first report to the one before the last.

    The first is a best and the last the end: both are saved on either side.
    """
    config = TrialConfig.model_validate(
        {
            "task": {"name": "given"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": epochs + 2},
            "checkpoint": {"every": every},
            "train": {"batch_size": batch_size},
        }
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        open_trainer(config, Path(directory), device="cpu", threads=1, task=task) as trainer,
    ):
        events = trainer.events()
        next(events)
        trainer.store.wait()
        started = time.perf_counter()
        for _ in range(epochs):
            next(events)
        return time.perf_counter() - started
