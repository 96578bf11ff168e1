"""Check before a sweep that the optimizer's state can be saved and restored to the same bits.

It steps on gradients that are drawn at random, saves, lets a newly built optimizer load the state,
and lets both take the same further steps. What must not live here: options (`optimizer_class.py`).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainable.config import TrainConfig, TrialConfig
from trainable.errors import CheckpointError, ConfigError, TaskError, TrainingError
from trainable.optim import normalize_groups
from trainable.optimizer_class import OWN_LOOP
from trainable.optimizer_config import OPTIMIZER_DEFAULTS, OptimizerConfig, is_own
from trainable.optimizer_state import OptimizerState
from trainable.optimizers import builds_own, evaluated_weights, optimizer_of
from trainable.schedule import Schedule
from trainable.seeding import preserved_host_rng
from trainable.snapshot import num_bytes, snapshot
from trainable.task import Task
from trainable.train_state import check_state

if TYPE_CHECKING:
    from trainable.build import Parts

_STEPS = 3
_OURS = tuple(OPTIMIZER_DEFAULTS)[:6]
_GRADIENT = 1e-2


def needs_check(config: OptimizerConfig, task: Task) -> bool:
    """Whether an optimizer is more than one that every release has been tested with.

    Building an optimizer costs seconds, so the usual ones without further arguments are not built.
    """
    own = builds_own(task) or is_own(config.name)
    return own or config.name not in _OURS or bool(config.arguments)


def check_optimizers(parts: Parts, configs: Sequence[TrialConfig], total_steps: int) -> int | None:
    """Check the optimizers and the schedules of several trials of one task.

    Args:
        parts: The parts of the first one's run; its model's parameters change.
        configs: The trials, the first one first.
        total_steps: The steps of the first one.

    Returns:
        The bytes of the first one's optimizer state; None if it was not built.

    Raises:
        ConfigError: An optimizer or a schedule cannot be used.
        TaskError: The same for an optimizer of `Task.build_optimizer`.
    """
    sizes: list[int | None] = []
    checked: list[object] = []
    for config in configs:
        train = config.train
        schedule = Schedule(
            train.schedule,
            peak=train.optimizer.lr,
            total_steps=total_steps,
            steps_per_epoch=parts.train.plan.windows,
            mode=config.modes[0],
            train=train,
        )
        for step in (0, total_steps // 2, total_steps - 1):
            schedule.factor(step)
        if needs_check(train.optimizer, parts.task) and train.optimizer not in checked:
            checked.append(train.optimizer)
            sizes.append(check_optimizer(parts, train))
        else:
            sizes.append(None)
    return sizes[0]


def check_optimizer(parts: Parts, config: TrainConfig) -> int:
    """Check that the optimizer of a run steps and that its state can be restored exactly.

    This changes the model's parameters: do not train it afterwards.

    Returns:
        The bytes of the optimizer's state.

    Raises:
        ConfigError: The configuration's optimizer cannot be built, or its state not be restored.
        TaskError: The same for an optimizer of `Task.build_optimizer`.
    """
    try:
        with preserved_host_rng():
            return _RoundTrip(parts, config).check()
    except _Unfit as problem:
        if builds_own(parts.task):
            raise TaskError(f"build_optimizer(): {problem}") from problem.__cause__
        name = config.optimizer.name
        raise ConfigError(f"{name!r}: {problem}", key="train.optimizer.name") from problem


class _Unfit(Exception):
    """The optimizer cannot be used; the message says why."""


class _RoundTrip:
    def __init__(self, parts: Parts, config: TrainConfig) -> None:
        self._parts, self._config = parts, config
        self._generator = torch.Generator().manual_seed(0)

    def check(self) -> int:
        """Compare an optimizer that continues with one that was restored."""
        first, state = self._build()
        parameters = [
            p
            for group in first.param_groups
            for p in group["params"]
            if p.requires_grad and not is_lazy(p)
        ]
        for _ in range(_STEPS):
            self._step(first, parameters, self._gradients(parameters))
        try:
            saved = _read_back(state.state_dict())
        except CheckpointError as problem:
            raise _Unfit(f"its state cannot be saved: {problem}") from problem
        # A user's class may raise anything.
        except Exception as problem:
            raise _Unfit(
                f"its state_dict() raised {type(problem).__name__}: {problem}; a run saves it and "
                "is resumed from it; let state_dict() return a dict with 'state' and "
                "'param_groups', such as that of the optimizer that it wraps"
            ) from problem
        weights = [p.detach().clone() for p in parameters]
        coming = [self._gradients(parameters) for _ in range(_STEPS)]
        with evaluated_weights(first):
            pass
        continued = self._continue(first, parameters, coming)
        with torch.no_grad():
            for parameter, value in zip(parameters, weights, strict=True):
                parameter.copy_(value)
        del first
        second, state = self._build()
        with _restoring():
            state.load_state_dict(saved)
            self._parts.schedule.set_lr(second, 1)
        restored = self._continue(second, parameters, coming)
        for parameter in parameters:
            parameter.grad = None
        if not all(map(_equal_bits, continued, restored)):
            raise _Unfit(
                "a newly built one that loads its state_dict() continues to other weights than "
                "the one that was saved; a resumed run must train to the same bits; let "
                "state_dict() and load_state_dict() have all that step() uses, and with the same "
                "types"
            )
        return num_bytes(saved)

    def _build(self) -> tuple[torch.optim.Optimizer, OptimizerState]:
        parts = self._parts
        groups = normalize_groups(parts.groups)
        optimizer = optimizer_of(parts.task, parts.model, self._config, groups)
        parts.schedule.set_lr(optimizer, 0)
        return optimizer, OptimizerState(optimizer)

    def _gradients(self, parameters: list[Tensor]) -> list[Tensor]:
        return [
            (_GRADIENT * torch.randn(p.shape, generator=self._generator)).to(p) for p in parameters
        ]

    def _continue(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[Tensor],
        coming: list[list[Tensor]],
    ) -> list[Tensor]:
        """Take steps under a fixed seed; return the weights."""
        torch.manual_seed(0)  # some optimizers round at random
        for gradients in coming:
            self._step(optimizer, parameters, gradients)
        return [p.detach().clone() for p in parameters]

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[Tensor],
        gradients: list[Tensor],
    ) -> None:
        try:
            optimizer.zero_grad(set_to_none=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        # A user's class may raise anything.
        except Exception as problem:
            said = f"{type(problem).__name__}: {problem}"
            # one that does not look at its closure calls None
            closure = "closure" in said or "'NoneType' object is not callable" in said
            remedy = OWN_LOOP if closure else "correct it, or its options"
            raise _Unfit(
                f"its zero_grad() or step() raised {said}; a step is one call without a closure, "
                f"after the gradients are computed and clipped; {remedy}"
            ) from problem
        self._parts.schedule.set_lr(optimizer, 1)


@contextmanager
def _restoring() -> Iterator[None]:
    try:
        yield
    except TrainingError:
        raise
    # As above.
    except Exception as problem:
        raise _Unfit(
            f"its load_state_dict() raised {type(problem).__name__}: {problem}; a run is resumed "
            "from its state_dict(); let load_state_dict() take what state_dict() gives"
        ) from problem


def _read_back(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as it is read from a checkpoint."""
    check_state(state, "the optimizer's state")
    file = io.BytesIO()
    torch.save(snapshot(state), file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (t.contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)
