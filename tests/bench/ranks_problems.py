"""P13: what both sides train on two ranks.

What must not live here: the loops (`ranks.py`, `ranks_ddp.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from trainable.find_task import load_task
from trainable.task import Data, Task

LR, MAX_NORM, EPOCHS = 1e-3, 1.0, 60
RANKS = 2


class GivenDigits(Task):
    """Digits, repeated up to a number of samples, without an evaluation to speak of.

    Args:
        samples: How many training samples there are.
        layers: The hidden layers of an MLP; 0: the small CNN.
        width: Its width.
    """

    def __init__(self, *, samples: int, layers: int = 0, width: int = 0) -> None:
        self.samples, self.layers, self.width = samples, layers, width
        self._digits = load_task("digits", {"model": "cnn"})

    def build_model(self) -> nn.Module:
        if not self.layers:
            return self._digits.build_model()
        sizes = [64, *[self.width] * self.layers]
        hidden: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            hidden += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(self.width, 10))

    def build_data(self) -> Data:
        inputs, targets = self.tensors()
        return Data(train=(inputs, targets), val=(inputs[:1], targets[:1]))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the training samples."""
        inputs, targets = self._digits.build_data().train  # type: ignore[misc]
        index = torch.arange(self.samples) % len(inputs)
        return inputs[index], targets[index]

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:  # noqa: ARG002
        return {"loss": 1.0}  # never a new best after the first: nothing is saved meanwhile


@dataclass(frozen=True)
class RanksProblem:
    """What both sides train.

    Attributes:
        arguments: Of `GivenDigits`.
        batch_size: Samples of a step, over all ranks.
        at_most: The goal: how much longer our step may take.
    """

    arguments: dict[str, Any]
    batch_size: int
    at_most: float

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch; the sizes leave no short last batch."""
        return int(self.arguments["samples"]) // self.batch_size

    def task(self) -> GivenDigits:
        """Return the task."""
        return GivenDigits(**self.arguments)


PROBLEMS = {
    "CNN": RanksProblem({"samples": 6400}, 64, 1.02),
    "MLP of 10 M": RanksProblem({"samples": 1280, "layers": 7, "width": 1290}, 64, 1.05),
}
