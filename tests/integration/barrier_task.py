"""A task that trains only once four trials of it run together, and notes where each one ran."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainable import Data, Task


class Barrier(Task):
    """Waits in `build_data` until as many trials as asked for are there.

    Each trial leaves a file in `directory`: the devices that it sees, its threads, and from when
    to when it ran for certain, by the machine's monotonic clock.
    """

    def __init__(self, *, directory: str, parties: int) -> None:
        self._directory = Path(directory)
        self._parties = parties
        self._stay: dict[str, Any] = {}
        self._note = self._directory / uuid.uuid4().hex

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def build_data(self) -> Data:
        self._stay = {
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": torch.get_num_threads(),
            "begun": time.monotonic(),
        }
        self._note.touch()
        deadline = time.monotonic() + 120
        while len(list(self._directory.iterdir())) < self._parties:
            if time.monotonic() > deadline:
                raise TimeoutError(f"fewer than {self._parties} trials run together")
            time.sleep(0.05)
        x, y = torch.randn(8, 2), torch.zeros(8, dtype=torch.long)
        return Data(train=(x, y), val=(x, y))

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> Mapping[str, float | Tensor]:
        metrics = super().evaluate(model, batches)
        self._note.write_text(json.dumps({**self._stay, "ended": time.monotonic()}))
        return metrics
