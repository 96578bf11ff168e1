"""Open a run's samples: the windows of its training and of its evaluation; what it holds out.

What must not live here: how a source reads (`data.py`, `streams.py`), and the other parts of a run
(`build.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from trainable.averaging import averaging_plan
from trainable.config import TrainConfig, TrialConfig
from trainable.data import (
    IndexPlan,
    SampledPlan,
    SplitReading,
    WindowPlan,
    open_source,
    sample_count,
)
from trainable.errors import WithoutEffect
from trainable.parallel.rank_values import evaluates_in_parts
from trainable.ranks import ALONE, Ranks, share_of
from trainable.report_plan import ReportPlan
from trainable.sample_kinds import is_stream
from trainable.schedule import check_length
from trainable.seeding import derive_seed, set_seed
from trainable.streams import Plan, Source, StreamPlan, open_stream
from trainable.task import Data, Task, check_split, is_loader
from trainable.user_code.task_import import no_exit


def open_sources(
    task: Task,
    data: Data,
    trial: TrialConfig,
    *,
    val_seed: int,
    device: torch.device,
    ranks: Ranks,
) -> tuple[Source, Source]:
    """Open the samples that a run trains on, and those that it evaluates on."""
    config = trial.train
    micro = config.micro_batch_size
    val_ranks = ranks if evaluates_in_parts(task) else ALONE

    def open_split(
        split: Literal["train", "val"], seed: int, plan: Callable[[], IndexPlan]
    ) -> Source:
        samples, own = (data.train, ranks) if split == "train" else (data.val, val_ranks)
        how = SplitReading(split, device, config.loader, data.collate_of(split), share_of(own))
        if is_stream(samples):
            most = trial.budget.val_batches if split == "val" else None
            return open_stream(data, config, how, seed=seed, batches=most, ranks=own)
        return open_source(samples, plan(), how)

    # Evaluation uses micro-batches, which are known to fit into memory, without shuffling.
    return (
        open_split("train", trial.seed, lambda: _train_plan(data, config, trial.seed)),
        open_split(
            "val",
            val_seed,
            lambda: WindowPlan(
                samples=sample_count(data.val),
                batch_size=micro,
                micro_batch_size=micro,
                seed=val_seed,
                shuffle=False,
                most=_most_evaluated(trial),
            ),
        ),
    )


def check_steps(config: TrialConfig, plan: Plan, tokens_per_sample: int | None = None) -> None:
    """Refuse a run with no steps on its data, or with too few for its schedule or averaging."""
    if isinstance(plan, WindowPlan):
        plan = _window_plan(config.train, plan.samples, config.seed)
    total = ReportPlan(config.budget, plan, tokens_per_sample).total_steps
    check_length(config.train.schedule, total)
    averaging_plan(config.train, total_steps=total, steps_per_epoch=plan.windows)


def check_batch_size_applies(plan: Plan) -> None:
    """Refuse a search of `train.batch_size` where the task decides the size of a step."""
    if isinstance(plan, SampledPlan) and plan.in_batches:
        reason = "Data(batch_sampler=...) chooses the samples of each step"
    elif isinstance(plan, StreamPlan) and plan.batched:
        reason = "train gives batches, of which each is one forward pass"
    else:
        return
    raise WithoutEffect(
        f"is searched, and {reason}: all trials would train alike; search an argument of the "
        "task that sets the size of its batches, and remove train.batch_size",
        key="train.batch_size",
    )


def _most_evaluated(config: TrialConfig) -> int | None:
    """Return how many of the validation samples are evaluated, the first ones; None: all."""
    batches = config.budget.val_batches
    return None if batches is None else batches * config.train.batch_size


def _train_plan(data: Data, config: TrainConfig, seed: int) -> IndexPlan:
    samples = sample_count(data.train)
    if data.sampler is None and data.batch_sampler is None:
        return _window_plan(config, samples, seed)
    return SampledPlan(
        data.batch_sampler if data.sampler is None else data.sampler,
        config,
        in_batches=data.sampler is None,
        num_indices=samples,
        seed=seed,
    )


def _window_plan(config: TrainConfig, samples: int, seed: int) -> WindowPlan:
    return WindowPlan(
        samples=samples,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        seed=seed,
        drop_last=config.loader.drop_last,
    )


SEED = derive_seed("test")
"""The seed under which test data are loaded and evaluated, the same for all trials."""


@dataclass(frozen=True)
class HeldOut:
    """Test samples that are not open: `data.test` has them, or a function that returns them."""

    data: Data

    @classmethod
    def of(cls, data: Data) -> HeldOut | None:
        """Return the test samples of a task; None if it gives none."""
        return None if data.test is None else cls(data)

    @no_exit("the task, while its test data were loaded,", "task")
    def open(self, config: TrainConfig, device: torch.device) -> Source:
        """Load the samples and open them, in their order and in micro-batches."""
        samples: Any = self.data.test
        collate = self.data.collate_of("test")
        if is_loader(samples):
            set_seed(SEED)
            samples = samples()
            check_split(samples, "test", "the function that build_data() gives as `test`", collate)
        how = SplitReading("test", device, config.loader, collate)
        if is_stream(samples):
            return open_stream(replace(self.data, test=samples), config, how, seed=SEED)
        micro = config.micro_batch_size
        plan = WindowPlan(sample_count(samples), micro, micro, seed=SEED, shuffle=False)
        return open_source(samples, plan, how)
