"""The test data of a task, which nothing loads before `sweep test`.

A run that trains keeps them as the task gave them: it loads, checks and moves none of the samples.
What must not live here: evaluating on them (`evaluate_test.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from trainable.config import TrainConfig
from trainable.data import Source, WindowPlan, open_source, sample_count
from trainable.seeding import derive_seed, set_seed
from trainable.splits import is_stream
from trainable.streams import open_stream
from trainable.task import Data, check_split, is_loader
from trainable.task_import import no_exit

SEED = derive_seed("test")
"""The seed under which test data are loaded and evaluated, the same for all trials."""


@dataclass(frozen=True)
class HeldOut:
    """Test samples that are not open.

    Attributes:
        data: The task's data. `test` has the samples, or a function that returns them.
    """

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
        if is_stream(samples):
            data = replace(self.data, test=samples)
            return open_stream(data, "test", config, seed=SEED, device=device)
        micro = config.micro_batch_size
        plan = WindowPlan(sample_count(samples), micro, micro, seed=SEED, shuffle=False)
        return open_source(
            samples,
            plan,
            split="test",
            device=device,
            loader=config.loader,
            collate=collate,
        )
