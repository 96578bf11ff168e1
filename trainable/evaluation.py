"""Call a task's `evaluate()` as a run does, and turn its result into metrics.

What must not live here: when a run evaluates (`loop.py`), and what the metrics decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainable.averaging import Average
from trainable.base_run import check_names, one_number
from trainable.errors import TaskError
from trainable.precision import Precision
from trainable.seeding import seeded
from trainable.task import Batch, Task
from trainable.user_code.task_code import task_code


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, then restore each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluated_model(
    model: nn.Module, *, precision: Precision, seed: int | None, average: Average | None
) -> Iterator[None]:
    """Have model, generators and torch as an evaluation needs them; restore all on exit."""
    # Not inference mode: training could not use what a model caches during evaluation, such as a
    # longer table of positions.
    with (
        nullcontext() if average is None else average.in_model(),
        evaluation_mode(model),
        seeded(seed),
        torch.no_grad(),
        precision.autocast(),
        task_code(),
    ):
        yield


def run_evaluation(
    task: Task,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    precision: Precision,
    seed: int | None,
    average: Average | None = None,
) -> object:
    """Return what a task's `evaluate()` returns for these batches."""
    with evaluated_model(model, precision=precision, seed=seed, average=average):
        return task.evaluate(model, batches)


def as_metrics(
    found: object, task: Task, device: torch.device, split: str = "val"
) -> dict[str, float]:
    """Return the result of `evaluate()` as metrics, each with the split's name as its prefix."""
    if not isinstance(found, dict) or not found:
        raise TaskError(
            f"evaluate() returned {found!r}; it must return a dict of metrics, such as "
            f"{{'loss': 0.5}}"
        )
    name_of_task = type(task).__name__
    check_names(found, f"{name_of_task}.evaluate() returned")
    return {
        f"{split}/{name}": one_number(value, f"{name_of_task}.evaluate() returned {name!r}")
        for name, value in _fetched(found, device).items()
    }


def _fetched(found: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Fetch the numbers that are on the device in one transfer."""
    single = {
        name: value.detach().reshape(()).double()
        for name, value in found.items()
        if isinstance(value, Tensor)
        and value.device == device
        and value.numel() == 1
        and not value.is_complex()
    }
    if not single:
        return found
    # device synchronisation: the only one of a report
    fetched = torch.stack(list(single.values())).tolist()
    return found | dict(zip(single, fetched, strict=True))
