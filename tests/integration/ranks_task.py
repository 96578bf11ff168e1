"""A task of two ranks, of which the second fails or stops at a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from trainable import Data, Task


class Ranked(Task):
    """Samples of two classes. What happens, happens once: it leaves a file in the directory.

    Args:
        directory: Receives a file with the process id of each rank.
        what: What happens to the second rank: `nothing`, `stopped`, `raises`.
    """

    def __init__(self, *, directory: str, what: str) -> None:
        self._directory, self._what = Path(directory), what
        self._steps = 0

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def build_data(self) -> Data:
        inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
        tensors = (inputs, torch.arange(32) % 2)
        return Data(train=tensors, val=tensors)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self._steps += model.training
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
        if self._steps == 1 and rank is not None:
            (self._directory / f"{self._what}-{rank}-{os.getpid()}").touch()
            print(f"rank {rank} trains")
        if self._steps == 6 and rank == 1 and self._what != "nothing":
            self._happen()
        return super().loss(model, batch)

    def _happen(self) -> None:
        if self._what == "raises":
            raise ZeroDivisionError("as the test asks for")
        mark = self._directory / self._what
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
