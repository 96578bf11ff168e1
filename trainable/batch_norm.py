"""BatchNorm in a trial of several ranks: over which samples it normalizes.

Each rank normalizes over its own part of a micro-batch, and the running statistics are those of
rank 0. With `train.sync_batch_norm` all ranks normalize over the whole micro-batch, on GPUs. What
must not live here: how buffers reach the other ranks (`parallel/rank_group.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from trainable.config import TrainConfig, TrialConfig
from trainable.data import SampledPlan, WindowPlan
from trainable.errors import ConfigError
from trainable.ranks import RankShare
from trainable.streams import Plan, StreamPlan

_KEY = "train.sync_batch_norm"
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def batch_norm_cautions(model: nn.Module, trial: TrialConfig) -> Iterator[str]:
    """Yield a sentence where BatchNorm makes the result depend on micro-batches or ranks."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    config, workers = trial.train, trial.workers
    if config.sync_batch_norm and workers == 1:
        yield (
            "train.sync_batch_norm is true and the trial has one process: nothing changes; it "
            "applies with resources.workers above 1"
        )
    if not names:
        return
    if config.accumulation > 1:
        yield (
            f"accumulation is {config.accumulation} and the model has BatchNorm "
            f"({_places(names)}), which normalizes over micro-batches of "
            f"{config.micro_batch_size} samples, not over the batch of {config.batch_size}: the "
            "result differs from that of the whole batch; use GroupNorm or LayerNorm, or "
            "accumulation 1"
        )
    if workers > 1 and not config.sync_batch_norm:
        micro = RankShare(0, workers).micro_size(config.micro_batch_size)
        yield (
            f"the trial has {workers} ranks and the model has BatchNorm ({_places(names)}), which "
            f"normalizes over the {micro} samples of one rank, not over the "
            f"{config.micro_batch_size} of all: the result depends on resources.workers; use "
            "GroupNorm or LayerNorm, or write train.sync_batch_norm: true (on GPUs)"
        )


def _places(names: Sequence[str]) -> str:
    """Return where a model has layers, from their names."""
    if not names[0]:
        return "the model itself"
    return f"module '{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def synchronize_batch_norm(
    model: nn.Module, config: TrainConfig, *, device: torch.device, size: int
) -> None:
    """Make each BatchNorm of a model a SyncBatchNorm, in place: others may refer to it."""
    if not config.sync_batch_norm or size == 1:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"true, and the trial trains on the device {device.type}; torch synchronizes "
            f"BatchNorm between GPUs only; write {_KEY}: false, or use GroupNorm or LayerNorm",
            key=_KEY,
        )
    found = [module for module in model.modules() if type(module) in _KINDS]
    if not found:
        raise ConfigError(
            "true, and the model has no BatchNorm1d, BatchNorm2d or BatchNorm3d; remove it",
            key=_KEY,
        )
    for module in found:
        module.process_group = None  # type: ignore[assignment]  # all ranks
        module.__class__ = nn.SyncBatchNorm


def check_passes(config: TrainConfig, remedy: str) -> None:
    """Refuse SyncBatchNorm where the ranks would make different numbers of forward passes."""
    if config.sync_batch_norm and remedy:
        raise ConfigError(
            "true, and in some steps the ranks would make different numbers of forward passes, "
            f"so that some would wait for the others; each step needs equal parts; {remedy}",
            key=_KEY,
        )


def remedy_for_passes(config: TrainConfig, plan: Plan, size: int) -> str:
    """Return what to write so that all ranks make as many forward passes in each step."""
    if size == 1:
        return ""
    in_batches = isinstance(plan, SampledPlan) and plan.in_batches
    batched = isinstance(plan, StreamPlan) and plan.batched
    sizes = {config.batch_size}
    if isinstance(plan, WindowPlan):
        sizes = {plan.size(window) for window in {0, plan.windows - 1}}
    elif in_batches or not config.loader.drop_last:
        sizes.add(1)  # of any size
    unequal = (
        config.accumulation % size or not config.loader.drop_last
        if batched
        else any(len(_passes(config, window, size)) > 1 for window in sizes)
    )
    if not unequal:
        return ""
    if in_batches:
        return "remove the batch sampler"
    batch = "train.accumulation" if batched else "train.batch_size / train.accumulation"
    return f"write train.loader.drop_last: true, and make {batch} a multiple of {size}"


def _passes(config: TrainConfig, window: int, size: int) -> set[int]:
    """Return the numbers of forward passes that the ranks make in a window of so many samples."""
    shares = [RankShare(rank, size) for rank in range(size)]
    micro = shares[0].micro_size(config.micro_batch_size)
    parts = (share.part(window) for share in shares)
    return {-(-(part.stop - part.start) // micro) for part in parts}
