"""Tasks for ranks on GPUs, in a module that further ranks import by name.

What must not live here: what must be true of them.
"""

from __future__ import annotations

import torch
from torch import nn

from trainable.task import Data, Task


class Blobs(Task):
    """Gaussian blobs, and a network of equal blocks.

    Args:
        batch_norm: Whether each block normalizes over the batch.
    """

    def __init__(self, *, batch_norm: bool = False) -> None:
        self.batch_norm = batch_norm

    def build_model(self) -> nn.Module:
        def block() -> nn.Module:
            norm = nn.BatchNorm1d(64) if self.batch_norm else nn.LayerNorm(64)
            return nn.Sequential(nn.Linear(64, 64), norm, nn.GELU())

        return nn.Sequential(nn.Linear(16, 64), block(), block(), nn.Linear(64, 3))

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(3, (480,), generator=generator)
        inputs = torch.randn(480, 16, generator=generator) + 1.5 * targets[:, None]
        return Data(train=(inputs[:400], targets[:400]), val=(inputs[400:], targets[400:]))
