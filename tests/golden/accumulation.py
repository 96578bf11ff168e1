"""The runs whose curves are kept in `accumulation.json`: one batch of eight, cut three ways.

A batch of 8 samples is 1 micro-batch of 8, 2 of 4, or 4 of 2. Losses and gradient norms must be
the same; they are also kept in a file, so that a change of the arithmetic is seen as one. The last
window of an epoch is short and some targets are ignored. What must not live here: tolerances (see
the test).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.seeding import preserved_host_rng
from trainable.task import Data, Task

FILE = Path(__file__).with_name("accumulation.json")
BATCH, SAMPLES, EPOCHS = 8, 30, 4  # windows of 8, 8, 8 and 6 samples
SPLITS = {"8x1": 1, "4x2": 2, "2x4": 4}
KINDS = {"float64": torch.float64, "float32": torch.float32}


class Waves(Task):
    """Three classes of points on a circle, from formulas alone: no generator, no download."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def build_model(self) -> nn.Module:
        """Return a small network; its weights are made in float64 and then rounded."""
        layers = (nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
        model = nn.Sequential(*(layer.double() for layer in layers))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                count = torch.arange(parameter.numel(), dtype=torch.float64)
                wave = torch.sin(1.7 * count + number).reshape(parameter.shape)
                parameter.copy_(0.4 * wave + (parameter.ndim == 1) * 0.6)
        return model.to(self._dtype)

    def build_data(self) -> Data:
        """Return points on a circle and their third of it; every seventh target is ignored."""
        count = torch.arange(SAMPLES, dtype=torch.float64)
        angle = 2.399963 * count
        columns = [angle.sin(), angle.cos(), (2 * angle).sin(), count / SAMPLES]
        inputs = torch.stack(columns, dim=1).to(self._dtype)
        targets = (angle % (2 * torch.pi) * 3 / (2 * torch.pi)).long()
        targets[::7] = -100
        return Data(train=(inputs, targets), val=(inputs, targets))


def curves(kind: str, split: str) -> dict[str, list[float]]:
    """Train one run; return the loss and the gradient norm of each step."""
    config = TrialConfig.model_validate(
        {
            "task": {"name": "waves"},
            "metric": "val/loss",
            "mode": "min",
            "seed": 3,
            "budget": {"epochs": EPOCHS},
            "train": {
                "batch_size": BATCH,
                "accumulation": SPLITS[split],
                "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
                "schedule": {"name": "cosine", "warmup": 4},
                "clip": {"max_norm": 0.5},
            },
        }
    )
    with tempfile.TemporaryDirectory() as directory, preserved_host_rng():
        options = {"device": "cpu", "threads": 1, "task": Waves(KINDS[kind])}
        with open_trainer(config, Path(directory), **options) as trainer:  # type: ignore[arg-type]
            rows = [row.metrics for report in trainer.events() for row in report.rows]
    return {key: [row[f"train/{key}"] for row in rows] for key in ("loss", "grad_norm")}
