"""Run a custom loop on a rank after the first: in step with it, without reports or checkpoints.

What must not live here: what is reported and saved (`custom_loop.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from trainable.base_run import BaseRun, RunReport, errors_reach_ranks
from trainable.config import TrialConfig
from trainable.config_reads import record_reads
from trainable.follower_files import NoCheckpoints, NoHistory
from trainable.logged import Log
from trainable.loop_context import Function, begin, open_context
from trainable.loop_steps import EXHAUSTED, LoopSteps
from trainable.precision import device_name
from trainable.ranks import Ranks


class CustomLoopRank(BaseRun):
    """A custom loop on a rank after the first.

    Args:
        function: The loop, as in `CustomLoop`.
        config: The run.
        directory: The run's directory on the first rank.
        device: Where the loop trains on this rank.
        ranks: This rank.
        accept_workers: Resume from a checkpoint of another number of ranks.
    """

    def __init__(
        self,
        function: Function,
        config: TrialConfig,
        directory: Path,
        *,
        device: torch.device,
        ranks: Ranks,
        accept_workers: bool = False,
    ) -> None:
        self._device = device
        self._log = Log()  # without a directory: nothing is recorded
        context, _ = open_context(
            config, directory, device, None, self._log, ranks, accept_workers=accept_workers
        )
        self._position = context.epoch
        generator = begin(function, record_reads(config)[0], context)
        self._steps = LoopSteps(generator, ranks, config.task.name, device)
        super().__init__(
            store=NoCheckpoints(directory),
            history=NoHistory(directory),
            ranks=ranks,
            resumed_at=context.epoch,
        )

    @property
    def resolved(self) -> dict[str, str]:
        """The device that the loop received."""
        return {"device": device_name(self._device)}

    @property
    def position(self) -> int:
        """Reports made by the first rank."""
        return self._position

    @errors_reach_ranks
    def events(self) -> Iterator[RunReport]:
        """Run the loop until the first rank ends it; yield nothing.

        Raises:
            TrainingError: The loop failed, on this rank or another one.
        """
        while self._ranks.next_report() and self._steps.next() is not EXHAUSTED:
            self._position += 1
            self._log.take()  # else it would grow
        yield from ()

    def _release(self) -> None:
        try:
            self._steps.close()
        finally:
            self._ranks.close()
