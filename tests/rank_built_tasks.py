"""Tasks that build something else on each rank, or change weights that no optimizer has."""

# ruff: noqa: ARG002  hooks and evaluate have the arguments that Task gives them

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import rank_training
from tests.rank_sync_tasks import Plain, Scale
from trainable.task import Batch, Task


class Held:
    """A part of a task."""

    def __init__(self, rate: float) -> None:
        self.rate = rate


class Apart(Plain):
    """Keeps values of each kind that are others on each rank, and computes with them.

    Those of rank 0 are those of one process.
    """

    def __init__(self) -> None:
        super().__init__()
        seed = rank_training.rank_of_process
        self.table = torch.tensor([[0, 1, 2], [2, 1, 0]][seed])
        self.array = numpy.arange(3.0) * (1 + seed)
        self.by_name = {"smooth": 0.1 * (1 + seed), "names": ["a", "b"][:: 1 - 2 * seed]}
        self.pair = (Held(0.5 + seed), "fixed")
        self.python = random.Random(seed)
        self.numpy = numpy.random.default_rng(seed)
        self.own = torch.Generator().manual_seed(seed)
        self.mode = ["double", "single"][seed]
        self.more = torch.ones(3 + seed)
        if seed:
            self.second = True

    def build_model(self) -> nn.Module:
        model = super().build_model()
        seed = rank_training.rank_of_process
        with torch.no_grad():
            self.teacher.weight.add_(seed)
        self.net.rate = 1.0 + seed  # type: ignore[assignment]
        self.scale = Scale()
        self.scale.factor = 1.0 + seed
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        inputs, targets = batch
        self.smooth = self.by_name["smooth"] + (self.by_name["names"][0] == "b") / 10
        # the same whatever a rank's part is: draws only in the hook below
        total, weight = super().loss(model, (inputs, self.table[targets]))
        factor = self.pair[0].rate + self.array[1] + float(self.net.rate) + len(self.more)
        if hasattr(self, "second") or self.mode == "single":
            factor *= 2
        return self.scale(total * factor), weight

    def on_step_end(self, step: int) -> None:
        drawn = self.python.random() + float(self.numpy.random())
        self.noise = torch.randn(3, generator=self.own).double() / 10 + drawn / 10


class Unseeded(Plain):
    """Draws from the operating system, so that a resumed run draws anew."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = random.SystemRandom().random()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        if model.training:
            self.log("offset", self.offset)
        self.strength = self.offset
        return super().loss(model, batch)


class Placed(Plain):
    """Keeps what each process has of its own, and trains the same with it.

    Args:
        more: Keep values that are sent, too.
    """

    def __init__(self, more: bool = False) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.places = {"cache": [self.directory], "data": f"/node-{os.getpid()}/data"}
        self.device = torch.device("cuda", rank_training.rank_of_process)
        if more:
            self.started, self.pid = time.time(), os.getpid()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        assert os.path.isdir(self.directory)
        assert self.places["cache"] == [self.directory]
        assert self.device.index == rank_training.rank_of_process
        return super().loss(model, batch)


class Typed(Plain):
    """Keeps an object of another class on each rank, which no other process can be given."""

    def __init__(self) -> None:
        super().__init__()
        self.best = [threading.Lock, threading.RLock][rank_training.rank_of_process]()


class Tempered(nn.Module):
    """A model with a frozen temperature.

    Args:
        averages: Whether `forward` writes a moving average of its samples into it.
    """

    def __init__(self, averages: bool) -> None:
        super().__init__()
        self.averages = averages
        self.hidden = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.last = nn.Linear(8, 3)
        self.temperature = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.averages and self.training:
            with torch.no_grad():
                self.temperature.lerp_(1 + inputs.abs().mean(), 0.1)
        out: Tensor = self.last(self.hidden(inputs)) / self.temperature
        return out


class Frozen(Plain):
    """Its optimizer has only what is trained."""

    averages = False

    def build_model(self) -> nn.Module:
        self.tempered = Tempered(self.averages).double()
        return self.tempered

    def param_groups(self, model: nn.Module) -> list[Any]:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


class Warming(Frozen):
    """Sets the temperature in its own `evaluate`."""

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, Any]:
        found = Task.evaluate(self, model, batches)
        with torch.no_grad():
            self.tempered.temperature.add_(float(found["loss"]))
        return dict(found)


class Calibrating(Warming):
    """Sets a parameter of whole numbers, too."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.codes = model.codes = nn.Parameter(torch.arange(3), requires_grad=False)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        inputs, targets = batch
        return super().loss(model, (inputs + self.codes[0], targets))

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, Any]:
        with torch.no_grad():
            self.codes.copy_(self.codes.roll(1))
        return super().evaluate(model, batches)


class Averaging(Frozen):
    """Its `forward` writes a moving average of its own part of each batch into a parameter."""

    averages = True


class Stepping(Frozen):
    """A hook steps a weight by its gradient, which the optimizer does not have."""

    def param_groups(self, model: nn.Module) -> list[Any]:
        given = super().param_groups(model)[0]["params"]
        return [{"params": [p for p in given if p is not self.tempered.last.bias]}]

    def on_step_end(self, step: int) -> None:
        bias = self.tempered.last.bias
        if bias.grad is not None:  # else this rank's part was empty
            bias.data.sub_(0.1 * bias.grad)
            bias.grad = None
