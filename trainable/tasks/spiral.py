"""Classify points of three spirals in the plane; small enough to plot the decision boundary."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainable.errors import ConfigError
from trainable.task import Data, Task

CLASSES = 3


class Spiral(Task):
    """Classify points by the arm of the spiral they lie on."""

    def __init__(
        self,
        *,
        samples: int = 200,
        width: int = 64,
        turns: float = 0.75,
        noise: float = 0.2,
        data_seed: int = 0,
        label_smoothing: float = 0.0,
    ) -> None:
        if samples < 4:
            raise ConfigError(
                f"spiral: samples is {samples}; it must be at least 4 for each class"
            )
        if width < 1:
            raise ConfigError(f"spiral: width is {width}; it must be at least 1")
        self.samples, self.width = samples, width
        self.turns, self.noise, self.data_seed = turns, noise, data_seed
        self.use_cross_entropy(classes=CLASSES, label_smoothing=label_smoothing)

    def build_model(self) -> nn.Module:
        """Return a model from points (N, 2) to logits (N, 3)."""
        return nn.Sequential(
            nn.Linear(2, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, CLASSES),
        )

    def build_data(self) -> Data:
        """Return points in the unit disc, shape (N, 2), with their classes, shape (N,)."""
        generator = torch.Generator().manual_seed(self.data_seed)
        return Data(
            train=self._points(self.samples, generator),
            val=self._points(self.samples // 4, generator),
            test=lambda: self._points(self.samples // 4, generator),
        )

    def points(self) -> tuple[Tensor, Tensor]:
        """Return the training points for a figure: shape (N, 2) and (N,)."""
        return self._points(self.samples, torch.Generator().manual_seed(self.data_seed))

    def _points(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        radius = torch.linspace(0.05, 1.0, count).repeat(CLASSES)
        classes = torch.arange(CLASSES).repeat_interleave(count)
        angle = 2 * math.pi * (self.turns * radius + classes / CLASSES)
        angle = angle + self.noise * torch.randn(angle.shape, generator=generator)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), classes
