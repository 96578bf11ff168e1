"""Optimizers and a schedule as users write them, for tests of single runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainable.config import TrainConfig


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., The Road Less Scheduled, 2024): evaluates an average."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = training

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            assert group["train_mode"], "call train() before step()"
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                weight = 1 / group["k"]
                p.lerp_(z, weight)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class TwoOptimizers:
    """Mixed into a task: Muon for the matrices, AdamW for the rest."""

    def build_optimizer(self, model: nn.Module, config: TrainConfig) -> list[Any]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return [
            torch.optim.Muon(matrices, lr=20 * config.optimizer.lr),
            torch.optim.AdamW(others, lr=config.optimizer.lr),
        ]


def two_levels(step: int, total: int, config: TrainConfig) -> float:
    """Stay at the peak for the first half, then at a tenth of it."""
    low: float = config.schedule.arguments.get("low", 0.1)
    return 1.0 if step < total / 2 else low
