"""ONE optimizer step, from cleared gradients to the next learning rate. The file to read first.

What must not live here: where batches come from, what is logged, when anything is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from trainable.averaging import Average
from trainable.errors import (
    ConfigError,
    NonFiniteGradient,
    NonFiniteLoss,
    OutOfMemory,
    TaskError,
)
from trainable.memory import is_out_of_memory
from trainable.object_kinds import tensor_signature
from trainable.optim import Clipper, Scalar, scheduled_lr
from trainable.precision import Precision, device_name
from trainable.ranks import ALONE, Decisions, Ranks, WindowSums
from trainable.schedule import Schedule
from trainable.task import Batch, Task

if TYPE_CHECKING:
    from trainable.object_state import ObjectState
    from trainable.parallel.sharding import Layout

_NO_GRADIENT = (
    "no parameter received a gradient; the loss does not depend on any parameter of "
    "param_groups(); compute it from the model's output without detach() or no_grad(), and return "
    "the weight 0 where there are no targets"
)


class StepOutcome(NamedTuple):
    """The result of one window. On an accelerator the values are tensors, not yet fetched.

    Attributes:
        taken: False when fp16 gradients overflowed: parameters, schedule and step count are
            unchanged.
        loss: Mean loss of the window.
        grad_norm: Global L2 norm of the mean gradient, before clipping.
        lr: Learning rate of the schedule, before the multipliers of parameter groups.
        clipped: Whether clipping changed the gradient.
        weight: What the window's loss was divided by.
        norms: L2 norm of each gradient before the division, shape (parameters with a gradient,).
        decided: What the first of several ranks decided before the exchange.
    """

    taken: bool
    loss: Scalar
    grad_norm: Scalar
    lr: float
    clipped: bool | Tensor
    weight: Scalar
    norms: Tensor
    decided: Decisions | None = None


@dataclass(frozen=True)
class StepParts:
    """What a step works on."""

    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    average: Average | None = None


class Step:
    """Take optimizer steps. The order is fixed here and cannot be configured.

    A non-finite loss never changes a parameter. On the CPU, and under fp16, it raises at once. On
    other accelerators a flag on the device stops the fused optimizer from that step on, and the
    next fetch of the values raises: see `raise_if_not_finite`. The same holds for a finite loss
    with a non-finite gradient, except under fp16, where it means an overflow: the step is skipped
    and the scale halved.
    """

    layout: Layout | None = None
    """How the tensors of a sharded model are saved and restored; None: the model is whole."""
    objects: Sequence[ObjectState] = ()
    """What the further passes of a sharded model leave as it is, besides weights and buffers."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the model."""
        return self.layout is not None

    def __init__(self, parts: StepParts, clipper: Clipper, ranks: Ranks = ALONE) -> None:
        model, optimizer, precision = parts.model, parts.optimizer, parts.precision
        self.ranks, self.clipper = ranks, clipper
        self.task, self.model, self.optimizer = parts.task, model, optimizer
        self.schedule, self.precision = parts.schedule, precision
        self.average = parts.average
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        place = {id(p): number for number, p in enumerate(model.parameters())}
        self.exchanged = sorted(self.parameters, key=lambda p: place.get(id(p), len(place)))
        """The parameters whose gradients the exchange adds up, in the order of the model."""
        trained = {id(p) for p in self.parameters}
        self.left_out = LeftOut([p for p in model.parameters() if id(p) not in trained])
        """The parameters of the model that the optimizer does not have, as far as each rank has
        them whole: no exchange of gradients makes them alike."""
        self.device = device = self.parameters[0].device
        # Reading a value from CPU memory is free; under fp16 the scaler waits for the device in
        # any case.
        self._reads_at_once = device.type == "cpu" or precision.scaler is not None
        self._stays_on = None if self._reads_at_once else device
        self._stop_on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._stopped = torch.zeros((), device=device)
        precision.clear_cast_cache_each_forward(model)

    def __call__(
        self,
        window: Iterable[Batch],
        step: int,
        decide: Callable[[], Decisions] = Decisions,
    ) -> StepOutcome:
        """Take step number `step` (counted from 1) on the micro-batches of one window.

        The ranks of a trial each have a part of the window. After the exchange, loss, weight and
        gradients are those of the whole window on every rank, and each takes the same step. What
        the first of several ranks decides by then, the exchange tells the others.
        """
        self.optimizer.zero_grad(set_to_none=True)
        (loss, weight, passes), decided = self.ranks.exchange(
            lambda: self._micro_batches(window), self.exchanged, decide, self._stays_on
        )
        if not passes:  # no micro-batch has targets: the gradients are 0
            self._backward(sum((p * 0).sum() for p in self.parameters if p.requires_grad))
        self.precision.unscale(self.optimizer)
        weight = self._divisor(weight)
        norm, clipped, norms = self.clipper(self._gradients(), weight)
        self._guard(loss / weight, norm, step)
        lr = scheduled_lr(self.optimizer, self.schedule.written)
        self.precision.step(self.optimizer)
        taken = self.precision.update()
        if taken:
            self.schedule.set_lr(self.optimizer, step)
        return StepOutcome(taken, loss / weight, norm, lr, clipped, weight, norms, decided)

    def passes(self, window: Iterable[Batch], *, backward: bool = False) -> Iterable[Batch]:
        """Return the micro-batches of a window; those of a sharded model keep ranks in step."""
        del backward
        return window

    def _micro_batches(self, window: Iterable[Batch]) -> WindowSums:
        """Add up the gradients of micro-batches; return loss, weight and backward passes."""
        loss: Scalar = 0.0
        weight: Scalar = 0.0
        passes = 0
        try:
            for batch in self.passes(window, backward=True):
                with self.precision.autocast():
                    part, share = self.task.loss(self.model, batch)
                if part.requires_grad or self.is_sharded:
                    self._backward(part)
                    passes += 1
                elif share:  # device synchronisation, if a constant loss has its weight on one
                    raise TaskError(_NO_GRADIENT)
                loss, weight = loss + self._read(part), weight + self._read(share)
        except Exception:
            with translate_torch_errors(self.device):  # before it is sent to the other ranks
                raise
        return WindowSums(loss, weight, passes)

    def _backward(self, loss: Tensor) -> None:
        self.precision.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _read(self, value: Scalar) -> Scalar:
        if not isinstance(value, Tensor):
            return value
        # Device synchronisation, for values on the CPU (free) and under fp16 (one more wait
        # besides the scaler's own).
        at_once = self._reads_at_once or value.device != self.device
        return value.item() if at_once else value.detach().reshape(())

    def _divisor(self, weight: Scalar) -> Scalar:
        """Return the window's weight, or 1 if all targets are ignored: the sums are then 0."""
        if self._reads_at_once:
            return weight or 1.0
        on_device = (
            torch.full((), weight, device=self._stopped.device)
            if isinstance(weight, (int, float))
            else weight
        )
        return on_device + (on_device == 0)

    def _gradients(self) -> list[Tensor]:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            raise TaskError(_NO_GRADIENT)
        return gradients

    def _guard(self, loss: Scalar, norm: Scalar, step: int) -> None:
        """Keep non-finite values from reaching a parameter."""
        if isinstance(loss, float) and isinstance(norm, float):
            overflow_is_handled = self.precision.scaler is not None
            raise_if_not_finite(loss, 0.0 if overflow_is_handled else norm, step)
            return
        # inf - inf is NaN: the sum is finite only if both are.
        bad = torch.isfinite(torch.as_tensor(loss + norm)).logical_not()
        torch.maximum(self._stopped, bad, out=self._stopped)
        if self._stop_on_device:
            self.optimizer.found_inf = self._stopped  # type: ignore[attr-defined]
        else:
            # Device synchronisation: an optimizer without fused kernels cannot be stopped on the
            # device.
            raise_if_not_finite(float(loss), float(norm), step)


def raise_if_not_finite(loss: float, norm: float, step: int) -> None:
    """Raise when the loss, or the gradient norm, of a step is not a finite number."""
    if not math.isfinite(loss):
        raise NonFiniteLoss(step, loss)
    if not math.isfinite(norm):
        raise NonFiniteGradient(step, norm)


@contextmanager
def translate_torch_errors(device: torch.device) -> Iterator[None]:
    """Turn known errors of torch into errors that name a remedy."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as problem:
        if is_out_of_memory(problem):
            where = device_name(device)
            raise OutOfMemory(
                f"the memory of the device {where} did not suffice ({problem}); raise "
                "train.accumulation (the same batch in smaller parts), lower train.batch_size, or "
                "give each trial a larger share of the device"
            ) from problem
        if "does not have a deterministic implementation" in str(problem):
            raise ConfigError(
                f"true, and the model needs an operation that is not ({problem}); write "
                "train.deterministic: false; resumed runs are then equal up to rounding only",
                key="train.deterministic",
            ) from problem
        if "Expected more than 1 value per channel" in str(problem):
            raise ConfigError(
                f"BatchNorm was given a single sample to train on ({problem}); if that is the "
                "epoch's last batch, write train.loader.drop_last: true; otherwise raise the "
                "micro-batch, which is batch_size / accumulation / resources.workers",
                key="train.batch_size",
            ) from problem
        if "mixed torch.Tensor and DTensor" in str(problem):
            raise TaskError(
                "a part of the model was used outside of the module that gathers it under "
                f"train.sharding: fsdp ({str(problem).splitlines()[0]}); call the modules "
                "themselves and not only their weights, let Task.sharded_modules() name the "
                "modules that use them, or write train.sharding: none"
            ) from problem
        if "does not support sparse gradients" in str(problem):
            raise TaskError(
                f"the model has sparse gradients, which no optimizer here takes ({problem}); "
                "build its embeddings without sparse=True"
            ) from problem
        raise


class LeftOut:
    """The values of parameters that the optimizer does not have, such as frozen ones."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._before: list[object] = []

    def from_now(self, *, lost: str) -> LeftOut:
        """Return one that finds which of them have changed since this call."""
        del lost  # each can be copied
        other = LeftOut(self.parameters)
        other._before = [tensor_signature(one) for one in self.parameters]
        return other

    def state_dict(self) -> list[Any]:
        """Return the number and the value of each that has changed."""
        return [
            [number, one.detach()]
            for number, (one, before) in enumerate(zip(self.parameters, self._before, strict=True))
            if tensor_signature(one) != before
        ]

    def load_state_dict(self, entries: list[Any]) -> None:
        """Copy what `state_dict` returned."""
        for number, value in entries:
            self.parameters[number].detach().copy_(value)
