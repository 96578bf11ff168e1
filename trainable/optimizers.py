"""Several optimizers as one, and optimizers that evaluate other weights than they train.

What must not live here: building one by name (`optim.py`), and states (`optimizer_state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainable.config import TrainConfig
from trainable.errors import TaskError
from trainable.group_joining import hidden_group
from trainable.optim import build_optimizer, set_base_rates, unusable
from trainable.task import Task
from trainable.task_code import task_code

_SHOWN = 3


class CombinedOptimizer:
    """Several optimizers that step one after the other; it stands in for a single one.

    A step of mixed precision is taken by all or by none, because the gradient scaler sees one
    optimizer. A non-finite gradient is found before any of them steps.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in their order."""
        return [group for one in self.optimizers for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        for one in self.optimizers:
            one.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Let each optimizer take its step."""
        for one in self.optimizers:
            one.step()

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call a hook before the first optimizer's step."""
        return self.optimizers[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        """Call a hook after the last optimizer's step."""
        return self.optimizers[-1].register_step_post_hook(hook)


def builds_own(task: Task) -> bool:
    """Whether a task has a `build_optimizer` of its own."""
    return type(task).build_optimizer is not Task.build_optimizer


def members(optimizer: torch.optim.Optimizer | CombinedOptimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a combined one has, or the single one."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def optimizer_of(
    task: Task, model: nn.Module, config: TrainConfig, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build the optimizer of a run: the task's own, or else that of the configuration."""
    with hidden_group(), task_code():
        built = task.build_optimizer(model, config)
    if built is None:
        optimizer = build_optimizer(config.optimizer, groups)
    else:
        optimizer = combine(built, model, config.optimizer.lr)
    train_mode(optimizer)
    return optimizer


def combine(built: object, model: nn.Module, peak: float) -> torch.optim.Optimizer:
    """Return the optimizers of `Task.build_optimizer` as one, whose rates the schedule scales."""
    found = [built] if isinstance(built, torch.optim.Optimizer) else built
    if not isinstance(found, list | tuple) or not found:
        raise TaskError(
            f"build_optimizer() returned {_described_value(built)}; it must return a "
            "torch.optim.Optimizer or a list of them"
        )
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise TaskError(
                f"build_optimizer() returned a list with {_described_value(one)}; it must hold "
                "torch.optim.Optimizer objects only"
            )
        if (why := unusable(one)) is not None:
            raise TaskError(f"build_optimizer(): {why}")
    groups = [group for one in found for group in one.param_groups]
    _check_parameters([p for group in groups for p in group["params"]], model)
    set_base_rates(groups, peak)
    if len(found) == 1:
        return cast("torch.optim.Optimizer", found[0])
    return cast("torch.optim.Optimizer", CombinedOptimizer(found))


def _described_value(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def _check_parameters(given: list[Tensor], model: nn.Module) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    counts: dict[int, int] = {}
    for p in given:
        counts[id(p)] = counts.get(id(p), 0) + 1
    twice = [names.get(key, "one outside the model") for key, n in counts.items() if n > 1]
    if twice:
        raise TaskError(
            f"build_optimizer() gives {_listed(twice)} to two optimizers; each parameter is "
            "trained by one; list it once"
        )
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in counts
    ]
    if missing:
        raise TaskError(
            f"build_optimizer() gives {_listed(missing)} to no optimizer, and requires_grad is "
            "set; a parameter that receives gradients is trained; add it to an optimizer, or "
            "freeze it in build_model() with requires_grad_(False)"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join([*names[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer evaluates other weights than it trains, as schedule-free ones do."""
    return any(map(_switches, members(optimizer)))


def train_mode(optimizer: torch.optim.Optimizer) -> None:
    """Put optimizers that have modes into training mode, which their step needs."""
    for one in filter(_switches, members(optimizer)):
        one.train()  # type: ignore[attr-defined]


@contextmanager
def evaluated_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the model the weights to evaluate, then the trained ones again, to the same bits.

    An optimizer that has modes computes one kind of weights from the other, which rounds. So the
    trained ones are kept meanwhile: an evaluation or a save must not change a training.
    """
    if not has_modes(optimizer):
        yield
        return
    modal = [one for one in members(optimizer) if _switches(one)]
    parameters = list(_parameters_of(modal))
    kept = [p.detach().clone() for p in parameters]
    for one in modal:
        one.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        train_mode(optimizer)
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def modal_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters whose evaluated weights differ from the trained ones."""
    return list(_parameters_of(one for one in members(optimizer) if _switches(one)))


def _parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[nn.Parameter]:
    for one in optimizers:
        for group in one.param_groups:
            yield from group["params"]


def _switches(optimizer: torch.optim.Optimizer) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
