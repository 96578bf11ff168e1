"""The optimizer and the learning-rate schedulers of `configure_optimizers`.

A run writes the learning rate of each step itself. So the module's schedulers get an optimizer of
their own, which takes no steps, and what they write there is copied into the run's. What must not
live here: when they step (`lightning.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainable.adapters.lightning_module import OWN_LOOP
from trainable.errors import TaskError

_CYCLED = ("betas", "momentum")
"""What schedulers change besides the learning rate."""
Entry = tuple[LRScheduler, str, int]
"""A scheduler, its interval (`step` or `epoch`) and its frequency."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_KEYS = {"scheduler", "interval", "frequency", "name", "strict"}


def configured(module: Any) -> tuple[torch.optim.Optimizer, list[Entry]]:
    """Return a new optimizer of the module, and its schedulers.

    Raises:
        TaskError: `configure_optimizers` returned something that a task cannot use.
    """
    found = module.configure_optimizers()
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    if isinstance(found, Mapping):
        optimizers, schedulers = [found["optimizer"]], [found.get("lr_scheduler")]
        _check_keys(found, {"optimizer", "lr_scheduler"})
    elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
        optimizers, schedulers = found[0], found[1] if isinstance(found[1], list) else [found[1]]
    else:
        optimizers, schedulers = found if isinstance(found, list | tuple) else [found], []
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        kinds = ", ".join(type(one).__name__ for one in optimizers) or "nothing"
        raise TaskError(
            f"configure_optimizers() returned {kinds}; a module without manual optimization has "
            f"one optimizer; return one, or {OWN_LOOP}"
        )
    return optimizers[0], [_scheduler(one) for one in schedulers if one is not None]


def _scheduler(given: Any) -> Entry:
    options = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = options["scheduler"]
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TaskError(
            "configure_optimizers() returned ReduceLROnPlateau, which waits for a metric; remove "
            "it, and write train.schedule: {name: plateau} in the spec"
        )
    _check_keys(options, _KEYS)
    if not isinstance(scheduler, LRScheduler):
        raise TaskError(
            f"configure_optimizers() returned the scheduler {type(scheduler).__name__}, which is "
            "no torch.optim.lr_scheduler.LRScheduler; derive it from that class"
        )
    return scheduler, options.get("interval", "epoch"), options.get("frequency", 1)


def _check_keys(given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(given.keys() - known):
        raise TaskError(
            f"configure_optimizers() returned a dict with {unknown[0]!r}, which a run does not "
            f"use; it uses {', '.join(sorted(known))}; remove it"
        )


def schedulers_apart(
    optimizer: torch.optim.Optimizer, entries: list[Entry]
) -> tuple[torch.optim.Optimizer, list[LRScheduler], list[tuple[str, int]]]:
    """Return an optimizer without the model's parameters, its schedulers, and when they step."""
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(torch.zeros(()))]
    optimizer.step()  # changes nothing without gradients; a scheduler wants one before its own
    return optimizer, [one[0] for one in entries], [one[1:] for one in entries]


def reset_rates(optimizer: torch.optim.Optimizer) -> None:
    """Undo what the schedulers wrote when they were made."""
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])


def copy_rates(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give the run's optimizer the learning rates that the schedulers wrote."""
    for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
        ours["lr"] = ours["initial_lr"] = theirs["lr"]
        for key in _CYCLED:
            if key in theirs:
                ours[key] = theirs[key]


def base_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each group from which the schedulers started."""
    return [group["initial_lr"] for group in optimizer.param_groups]


def scale_rates(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler], bases: Sequence[float]
) -> None:
    """Scale restored schedules to other base rates, as a trial of PBT that copied one has."""
    for index, (group, base) in enumerate(zip(optimizer.param_groups, bases, strict=True)):
        factor = base / (group["initial_lr"] or 1.0)
        if base == group["initial_lr"]:
            continue
        for key in group.keys() & set(_RATES):
            group[key] *= factor
        for scheduler in schedulers:
            scheduler.base_lrs[index] *= factor
