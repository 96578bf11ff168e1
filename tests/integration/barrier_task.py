"""A task that trains only once four trials of it run together."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from tests.time_limits import Deadline
from trainable import Data, Task


class Barrier(Task):
    """Waits in `build_data` until as many processes as asked for are there. Each leaves which GPUs
    it sees, and how many threads it has, in a file of its own.
    """

    def __init__(self, *, directory: str, parties: int) -> None:
        self._directory = Path(directory)
        self._parties = parties

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def build_data(self) -> Data:
        mine = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        (self._directory / str(os.getpid())).write_text(f"{mine} {torch.get_num_threads()}")
        deadline = Deadline(120)
        while len(list(self._directory.iterdir())) < self._parties:
            if deadline.passed:
                raise TimeoutError(f"fewer than {self._parties} trials run together")
            time.sleep(0.05)
        x, y = torch.randn(8, 2), torch.zeros(8, dtype=torch.long)
        return Data(train=(x, y), val=(x, y))
