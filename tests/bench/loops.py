"""P3: the loops that are compared. Each trains one epoch per call and returns its seconds.

The bare loop is the one that people write by hand from a tutorial: clear, forward, mean loss,
backward, clip, step, schedule, add up `loss.item()`. Ours does the same and also logs loss,
learning rate and gradient norm of every step, norms per layer every tenth step, and stands ready
to checkpoint. What must not live here: peers that have to be installed (see `peers.py`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.bench.device import DEVICE, wait_for_device
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.find_task import load_task
from trainable.task import Data, Task

LR, MAX_NORM, EPOCHS = 1e-3, 1.0, 60
Tensors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """What all sides train.

    Attributes:
        task: A built-in task's name.
        arguments: Its arguments.
        samples: How many of its training samples are taken, repeated where there are fewer.
        batch_size: Samples of a step.
        accumulation: Micro-batches of a step.
    """

    task: str
    arguments: dict[str, Any]
    samples: int
    batch_size: int
    accumulation: int = 1

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch; the sizes leave no short last batch."""
        return self.samples // self.batch_size

    def build(self) -> tuple[Task, Tensors]:
        """Return the task and its training data."""
        task = load_task(self.task, self.arguments)
        inputs, targets = task.build_data().train  # type: ignore[misc]
        index = torch.arange(self.samples) % len(inputs)
        return task, (inputs[index], targets[index])


PROBLEMS = {
    "MLP": Problem("digits", {"model": "mlp", "width": 128}, 6400, 64),
    "MLP, accumulation 4": Problem("digits", {"model": "mlp", "width": 128}, 6400, 64, 4),
    "CNN": Problem("digits", {"model": "cnn"}, 3200, 64),
    "transformer": Problem("char_lm", {"context": 32, "width": 64, "text_bytes": 40_000}, 512, 16),
}


class Samples(Dataset[Tensors]):
    """The same tensors, one sample at a time: what forces a DataLoader upon us."""

    def __init__(self, tensors: Tensors) -> None:
        self._inputs, self._targets = tensors

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Tensors:
        return self._inputs[index], self._targets[index]


class _Given(Task):
    """A task on given data, whose evaluation costs nothing: epochs of training are compared."""

    def __init__(self, task: Task, data: Any) -> None:
        self._task, self._data = task, data

    def build_model(self) -> nn.Module:
        return self._task.build_model()

    def build_data(self) -> Data:
        return Data(train=self._data, val=(torch.zeros(1), torch.zeros(1)))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self._task.loss(model, batch)

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:  # noqa: ARG002
        return {"loss": 1.0}  # never a new best after the first: nothing is saved meanwhile


class Ours:
    """Our trainer, an epoch per call."""

    def __init__(
        self, problem: Problem, *, loader: bool, compile: bool = False, ema: bool = False
    ) -> None:
        task, tensors = problem.build()
        self._directory = tempfile.TemporaryDirectory()
        config = TrialConfig.model_validate(
            {
                "task": {"name": problem.task},
                "metric": "val/loss",
                "mode": "min",
                "budget": {"epochs": EPOCHS},
                "checkpoint": {"every": f"{EPOCHS} epochs"},
                "train": {
                    "batch_size": problem.batch_size,
                    "accumulation": problem.accumulation,
                    "optimizer": {"lr": LR},
                    "schedule": {"name": "onecycle", "warmup": 0.3},
                    "clip": {"max_norm": MAX_NORM},
                    "layer_norms_every": 10,
                    "precision": "fp32",
                    "compile": compile,
                    "ema": {"decay": 0.999} if ema else {},
                },
            }
        )
        self._trainer = open_trainer(
            config,
            Path(self._directory.name),
            device=str(DEVICE),
            threads=1,
            task=_Given(task, Samples(tensors) if loader else tensors),
        )
        self._events = self._trainer.events()

    def __call__(self) -> float:
        started = time.perf_counter()
        next(self._events)
        wait_for_device()
        return time.perf_counter() - started

    def close(self) -> None:
        """End the run."""
        self._trainer.close()
        self._directory.cleanup()


class Bare:
    """The loop written by hand, an epoch per call."""

    def __init__(self, problem: Problem, *, loader: bool, fused: bool = False) -> None:
        task, tensors = problem.build()
        self._model = task.build_model().to(DEVICE)
        self._accumulation = problem.accumulation
        micro = problem.batch_size // problem.accumulation
        on_device = (tensors[0].to(DEVICE), tensors[1].to(DEVICE))
        self._batches: Callable[[], Iterable[Tensors]] = (
            DataLoader(TensorDataset(*tensors), batch_size=micro, shuffle=True).__iter__
            if loader
            else lambda: _indexed(on_device, micro)
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=fused or None)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, max_lr=LR, total_steps=EPOCHS * problem.steps
        )

    def __call__(self) -> float:
        started = time.perf_counter()
        model, optimizer, total = self._model, self._optimizer, 0.0
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for number, (inputs, targets) in enumerate(self._batches(), 1):
            loss = mean_loss(model, inputs.to(DEVICE), targets.to(DEVICE)) / self._accumulation
            loss.backward()
            total += loss.item()
            if number % self._accumulation == 0:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                self._schedule.step()
                optimizer.zero_grad(set_to_none=True)
        wait_for_device()
        return time.perf_counter() - started


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy; the classes are the last dimension of the model's output."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _indexed(tensors: Tensors, size: int) -> Iterator[Tensors]:
    order = torch.randperm(len(tensors[0]), device=tensors[0].device)
    for start in range(0, len(order), size):
        index = order[start : start + size]
        yield tensors[0][index], tensors[1][index]
