"""Refuse a task that builds or reads other things on one rank than on another.

Each rank takes its part of samples that all ranks have alike. A task that divides its data itself,
by the environment or by torch.distributed, would train on a part of a part, and silently lose
samples. What must not live here: how samples are divided (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainable.data import SampledPlan
from trainable.errors import ConfigError, TaskError
from trainable.object_kinds import tensor_signature
from trainable.ranks import ALIKE_REMEDY
from trainable.streams import Plan
from trainable.user_code.fingerprint import differences
from trainable.user_code.task_import import listed

if TYPE_CHECKING:
    from trainable.step import Step

_NORMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_built_alike(summaries: Sequence[dict[str, Any] | None]) -> None:
    """Refuse a task that builds another model or other data on one rank."""
    first, *others = summaries
    for rank, other in enumerate(others, 1):
        if first and other and (found := differences(first, other)):
            raise ConfigError(
                f"rank {rank} builds something else than rank 0 ({listed(found)}); {ALIKE_REMEDY}",
                key="task",
            )


def weight_norms(step: Step) -> list[str]:
    """Return what `check_weights_alike` compares (synchronises devices); nothing for one rank."""
    if step.ranks.size == 1:
        return []
    weights = _compared(step)
    kinds = [one for one in weights if one.dtype in _NORMED]
    norms = iter(torch._foreach_norm(kinds) if kinds else ())
    return [
        repr(next(norms).double().item() if one.dtype in _NORMED else tensor_signature(one))
        for one in weights
    ]


def check_weights_alike(norms: Sequence[list[str]], step: Step) -> None:
    """Refuse weights that differ from rank to rank."""
    first, *others = norms
    for rank, other in enumerate(others, 1):
        if other != first:
            number = next(n for n, norm in enumerate(first) if other[n] != norm)
            names = {id(p): name for name, p in step.model.named_parameters()}
            name = names.get(id(_compared(step)[number]), "outside of the model")
            raise TaskError(
                f"the weights of rank {rank} differ from those of rank 0, the first of them is "
                f"{name}; each rank takes the same step, and what else changes weights must do "
                "the same on each: let no hook depend on the rank, no evaluate() of the task's "
                "own change trained weights, and no optimizer draw from the global random "
                "generators (seed one of its own); what forward() computes from its samples, "
                "such as a moving average, belongs in a buffer, and what a hook steps by its "
                "gradient in param_groups()"
            )


def _compared(step: Step) -> list[Tensor]:
    """Return the weights that each rank has whole, whether or not they are trained.

    Tensors of other classes, such as quantized ones, may have no norm; the optimizer's are plain.
    """
    return [
        *step.exchanged,
        *(one for one in step.left_out.parameters if type(one) is nn.Parameter),
    ]


def check_trained_alike(
    parameters: Sequence[Tensor], names: Mapping[int, str], of_ranks: Sequence[str]
) -> None:
    """Refuse a parameter that one rank trains and another does not.

    `of_ranks` has a letter of each parameter, a small one if it requires a gradient.
    """
    if all(marks == of_ranks[0] for marks in of_ranks):
        return
    for parameter, *marks in zip(parameters, *of_ranks, strict=True):
        flags = [mark.islower() for mark in marks]
        if len(set(flags)) > 1:
            name = names.get(id(parameter), f"of shape {list(parameter.shape)}")
            rank = flags.index(not flags[0])
            trains, other = ("rank 0", f"rank {rank}")[:: 1 if flags[0] else -1]
            raise TaskError(
                f"the parameter {name} requires a gradient on {trains} and not on {other}; ranks "
                "add up the gradients of the same parameters; freeze and unfreeze them in "
                "on_epoch_start() or on_epoch_end(), by what is the same on each rank: the "
                "number of the epoch, what evaluate() has found, or a loss that is added up by "
                "torch.distributed.all_reduce()"
            )


def order_of(plan: Plan, epoch: int, num_samples: int) -> list[Any]:
    """Return what `check_orders_alike` compares: the number of samples, and a sampler's order."""
    return [num_samples, plan.digest(epoch) if isinstance(plan, SampledPlan) else None]


def check_orders_alike(of_ranks: Sequence[list[Any]], epoch: int) -> None:
    """Refuse a data set of another length on one rank, or a sampler that chooses other samples."""
    (first_length, first_order), *_ = of_ranks
    for rank, (length, order) in enumerate(of_ranks):
        if length != first_length:
            raise TaskError(
                f"train has {length} samples in epoch {epoch + 1} on rank {rank} and "
                f"{first_length} on rank 0; each rank trains its part of each batch, so all must "
                "have the same samples; let nothing that adds or removes samples depend on the "
                "rank, or add up what it depends on by torch.distributed.all_reduce()"
            )
        if order != first_order:
            raise TaskError(
                f"the sampler chooses other samples for epoch {epoch + 1} on rank {rank} than on "
                "rank 0; each rank trains its part of each batch, so all must choose alike; let "
                "nothing in the sampler depend on the rank. If it weighs samples by what was "
                "trained, each rank has seen its own part: collect what it saw since the epoch "
                "began, and add it up over the ranks in on_epoch_end(), by "
                "torch.distributed.all_reduce(); or write resources.workers: 1"
            )
