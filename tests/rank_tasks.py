"""Tasks whose ranks must have the same: what they build, what hooks and `evaluate` change.

What must not live here: what the tests expect of them (`test_ranks_alike.py`).
"""

# ruff: noqa: ARG002  hooks and evaluate have the arguments that Task gives them

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections import deque
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import rank_training
from trainable.task import Batch, Data, Task


class Plain(Task):
    """Float64; draws nothing in its steps, so that all draws are those of its hooks."""

    def __init__(self) -> None:
        self.smooth, self.strength, self.noise = 0.3, 0.0, torch.zeros(3).double()

    def build_model(self) -> nn.Module:
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.net.register_buffer("shift", torch.zeros(5).double(), persistent=False)
        self.teacher = nn.Linear(5, 3).double().requires_grad_(False)
        return self.net

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(37, 5, generator=generator).double()
        targets = torch.randint(3, (37,), generator=generator)
        return Data(train=(inputs, targets), val=(inputs[:13], targets[:13]))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        inputs, targets = batch
        inputs = inputs * (1 + self.strength) - self.net.shift
        logits = model(inputs) + self.teacher(inputs) + self.noise
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.smooth)
        return loss, len(targets)


class Changing(Plain):
    """Changes each kind of value in its own `evaluate`, and unfreezes by what that found."""

    def __init__(self) -> None:
        super().__init__()
        self.gone, self.kept = "until the first evaluation", [0.0]
        self.queue = deque([1, 2, 3], maxlen=3)
        self.table: dict[str, Any] = {"best": None, "all": []}
        self.array, self.found = numpy.zeros(3), torch.zeros(2)
        self.own, self.python = torch.Generator(), random.Random(1)
        self.own.manual_seed(1)
        self.numpy = numpy.random.default_rng(1)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.net[0].requires_grad_(False)
        self.dropout = nn.Dropout(0.0)
        model.rate = 1.0  # type: ignore[assignment]
        return model

    def on_epoch_start(self, epoch: int) -> None:
        if epoch and self.smooth < 0.2:
            self.net[0].requires_grad_(True)

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, Any]:
        batches = list(batches)
        found = Task.evaluate(self, model, batches)
        accuracy = float(found["accuracy"])
        self.log("seen", sum(len(targets) for _, targets in batches), reduce="sum")
        self.smooth /= 2
        self.newest = accuracy
        vars(self).pop("gone", None)
        self.kept.append(accuracy)
        self.queue.append(len(self.kept))
        self.table["best"] = max(accuracy, self.table["best"] or 0.0)
        self.table["all"].append((accuracy, len(self.kept)))
        self.array[1] += accuracy
        self.found += accuracy
        self.noise = torch.randn(3, generator=self.own).double() / 10
        self.strength = self.python.random() / 10 + float(self.numpy.random()) / 10
        with torch.no_grad():
            self.teacher.weight.add_(0.01)
        self.net.shift = batches[0][0].mean(0) / 10
        self.net.rate *= 2.0  # type: ignore[operator]
        self.net[2].bias.requires_grad_(len(self.kept) % 2 == 0)
        self.dropout.p += 0.1
        return dict(found)


class Deep(Changing):
    """The same with weights that `train.sharding: fsdp` cuts, and that all passes use."""

    def on_epoch_start(self, epoch: int) -> None:
        """Unfreeze nothing."""


class Counting(Plain):
    """An iterator of its own moves on in `evaluate`, which no other rank can be given."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(1000))

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        next(self.numbers)
        return Task.evaluate(self, model, batches)


class Scale(nn.Module):
    """A factor that only `get_extra_state()` saves."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, logits: Tensor) -> Tensor:
        return logits * self.factor

    def get_extra_state(self) -> Any:
        return {"factor": self.factor}

    def set_extra_state(self, state: Any) -> None:
        self.factor = state["factor"]


class Saving(Counting):
    """The same iterator in a task that says by methods of its own what matters of it."""

    def build_model(self) -> nn.Module:
        net = super().build_model()
        self.net, self.outer = net, Scale()
        return nn.Sequential(net, Scale())

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        self.smooth /= 2
        self.outer.factor *= 1.1
        model[1].factor *= 0.9
        return super().evaluate(model, batches)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        total, weight = super().loss(model, batch)
        return total * self.outer.factor, weight

    def state_dict(self) -> dict[str, Any]:
        return {"smooth": self.smooth, "outer": self.outer.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.smooth, self.outer.factor = state["smooth"], state["outer"]


class Freezing(Plain):
    """Freezes a layer in the second micro-batch of each odd step, after the first had its own."""

    passes, step = 0, 0

    def on_step_end(self, step: int) -> None:
        self.passes, self.step = 0, step
        self.net[0].requires_grad_(True)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        self.passes += model.training
        if self.passes == 2:
            self.net[0].requires_grad_(self.step % 2 == 1)
        return super().loss(model, batch)


class Best:
    """What an evaluation has found."""

    def __init__(self) -> None:
        self.value = 0.0


class Making(Plain):
    """Makes an object in its first evaluation, and changes it in the second."""

    best: Best | None = None

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        found = Task.evaluate(self, model, batches)
        if self.best is None:
            self.best = Best()
        else:
            self.best.value = float(found["loss"])
        return found


class EpochDraws(Plain):
    """Draws in the hooks of an epoch, from each generator."""

    drawn: tuple[float, ...] = ()

    def on_epoch_start(self, epoch: int) -> None:
        self.strength = random.choice([0.0, 0.5, 1.0, 2.0])
        self.drawn += (self.strength, float(numpy.random.rand()))

    def on_epoch_end(self, epoch: int) -> None:
        with torch.no_grad():
            self.teacher.weight.add_(torch.randn_like(self.teacher.weight), alpha=0.1)
        self.drawn += (random.random(), float(torch.rand(())))


class StepDraws(Plain):
    """Draws in the hook of a step, from each generator."""

    drawn: tuple[float, ...] = ()

    def on_step_end(self, step: int) -> None:
        with torch.no_grad():
            self.teacher.weight.add_(torch.randn_like(self.teacher.weight), alpha=0.1)
        self.drawn += (random.random(), float(numpy.random.rand()), float(torch.rand(())))


class Unfreezing(Plain):
    """Unfreezes its first weight in one place.

    Args:
        where: `epoch`, `step` or `loss`: where it does so in the second epoch; with `alone`
            behind it, on rank 1 only, as if by that rank's own loss.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, *self.alone = where.split()
        self.steps = 0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.net[0].weight.requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        if model.training and self.steps == 5:
            self._unfreeze("loss")
        return super().loss(model, batch)

    def on_epoch_start(self, epoch: int) -> None:
        if epoch == 1:
            self._unfreeze("epoch")

    def on_step_end(self, step: int) -> None:
        self.steps = step
        if step == 5:
            self._unfreeze("step")

    def _unfreeze(self, where: str) -> None:
        if where == self.where and (not self.alone or rank_training.rank_of_process == 1):
            self.net[0].weight.requires_grad_(True)


class Recording(Plain):
    """Its loss changes each kind of value, on the task and on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.lengths = 0, [0]
        self.queue = deque([0], maxlen=3)
        self.table: dict[str, Any] = {"all": []}
        self.mean, self.array = torch.zeros(5).double(), numpy.zeros(2)
        self.pair = (Best(), 1)
        self.own = torch.Generator()

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.calls = 0  # type: ignore[assignment]
        return model

    def on_step_end(self, step: int) -> None:
        assert all(module.training for module in self.net.modules())

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        self.calls += 1
        self.lengths.append(len(batch[1]))
        self.queue.append(len(batch[1]))
        self.table["all"].append(self.calls)
        self.mean += batch[0].mean(0)
        self.array += 1
        self.pair[0].value += 1
        self.newest = self.calls
        self.noise = torch.randn(3, generator=self.own).double() / 10
        with torch.no_grad():
            self.teacher.weight.add_(0.01)
        self.net.shift = batch[0].mean(0) / 10
        self.net.calls += 1  # type: ignore[operator]
        return super().loss(model, batch)


class Exhausting(Recording):
    """Its loss moves an iterator on, which nothing can set back."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(1000))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        next(self.numbers)
        return super().loss(model, batch)


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
