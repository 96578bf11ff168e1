"""One of two processes on a GPU: `python -m tests.gpu.shared_gpu_process ROLE DIRECTORY SHARE`.

`modest` trains, and prints a line when it has begun and a digest of its model in the end; `greedy`
asks for more than its share, and prints how that ended. What must not live here: what must be true
of both.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.errors import OutOfMemory
from trainable.loop import Trainer
from trainable.task import Data, Task

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda:0")


class Modest(Task):
    """A network with dropout, trained for long enough to be met by a neighbour."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.GELU(),
            nn.Linear(512, 10),
        )  # fmt: skip

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, 64, generator=generator)
        targets = torch.randint(10, (4096,), generator=generator)
        return Data(train=(inputs, targets), val=(inputs[:512], targets[:512]))


class Greedy(Modest):
    """Takes a share and a half of the GPU in its third step, in pieces of 64 MiB."""

    def __init__(self, share: float) -> None:
        self.share, self.calls = share, 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            free, total = torch.cuda.mem_get_info(DEVICE)
            wanted = 1.5 * self.share * total
            print("the GPU has room for it:", free > wanted, flush=True)
            held = [
                torch.empty(64 * 2**20, dtype=torch.uint8, device=DEVICE)
                for _ in range(int(wanted / (64 * 2**20)))
            ]
            del held
        return super().loss(model, batch)


def _config(epochs: int) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "task": {"name": "given"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": epochs},
            "train": {"batch_size": 64, "precision": "fp32"},
            "checkpoint": {"every": "1000 epochs"},
        }
    )


def main(role: str, directory: str, share: float) -> None:
    """Train as one of the two."""
    task, epochs = (Modest(), 120) if role == "modest" else (Greedy(share), 1)
    with open_trainer(
        _config(epochs), Path(directory), device=DEVICE, memory_share=share, task=task
    ) as trainer:
        try:
            for report in trainer.events():
                if report.epoch == 1:
                    print("has begun", flush=True)
        except OutOfMemory:
            print("stopped by its cap", flush=True)
            return
        assert isinstance(trainer, Trainer)
        state = trainer.model.state_dict()
    print(hashlib.sha256(b"".join(v.cpu().numpy().tobytes() for v in state.values())).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
