"""Tasks whose models are cut among ranks."""

from __future__ import annotations

import errno
import os
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tests import rank_training
from tests.rank_training import Odd
from trainable.store.local import LocalFiles
from trainable.task import Batch, Task


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(5, 5), nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = inputs + self.drop(torch.tanh(self.linear(inputs)))
        return hidden


class _Deep(nn.Module):
    """Blocks of its own units, tied weights, and parameters that few samples or none use."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.twin = nn.Linear(5, 8, bias=False)
        self.twin.weight = self.first.weight
        self.blocks = nn.ModuleList(_Block(dropout) for _ in range(2))
        self.last = nn.Linear(5, 2)
        self.one = nn.Linear(5, 1)
        self.unused = nn.Parameter(torch.ones(4))
        self.rare = nn.Parameter(torch.ones(3))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64).expand(3))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        hidden: Tensor = torch.tanh(self.first(inputs)) @ self.twin.weight
        for block in self.blocks:
            hidden = block(hidden)
        out = torch.cat([self.last(hidden), self.one(hidden)], 1) * self.scale
        rare = inputs[:, 0] > 1.5
        return out + rare.to(out)[:, None] * self.rare if bool(rare.any()) else out


class Deep(Odd):
    """The data of `Odd`, of which the last window has one sample; a deep model in float64."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
        now = [str(rank_training.rank_of_process), "killed", str(self.calls + 1)]
        if self.fails == now:
            os._exit(9)
        if self.fails == [now[0], "full", now[2]]:
            _fill_disk()
        return super().loss(model, batch)

    def build_model(self) -> nn.Module:
        return _Deep(self.dropout).double()


class Counted(Deep):
    """With an `evaluate()` of its own."""

    def evaluate(self, model: nn.Module, batches: object) -> dict[str, float]:
        found = Task.evaluate(self, model, batches)  # type: ignore[arg-type]
        return {"loss": float(found["loss"]), "own": 1.0}


class Grouped(Deep):
    """With parameter groups of different learning rates, which the schedule keeps apart."""

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        return [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr_multiplier": 0.5},
        ]


def _fill_disk() -> None:
    """Let this rank's next shard meet a full disk."""
    add_shard = LocalFiles.add_shard

    def full(*_: object) -> NoReturn:
        LocalFiles.add_shard = add_shard  # type: ignore[method-assign]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    LocalFiles.add_shard = full  # type: ignore[method-assign,assignment]
