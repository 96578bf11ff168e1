"""Classify handwritten digits: 8x8 grey images, ten classes; the data come with scikit-learn."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from trainable.errors import ConfigError
from trainable.task import Data, Task

CLASSES = 10


class Digits(Task):
    """Classify 1,797 handwritten digits."""

    def __init__(
        self,
        *,
        model: Literal["cnn", "mlp"] = "cnn",
        width: int = 16,
        dropout: float = 0.0,
        val_fraction: float = 0.2,
        split_seed: int = 0,
        fold: int = 0,
        folds: int | None = None,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        if model not in ("cnn", "mlp"):
            raise ConfigError(f"digits: model is {model!r}; it must be 'cnn' or 'mlp'")
        if width < 4 or width % 4:
            raise ConfigError(f"digits: width is {width}; it must be a positive multiple of 4")
        if not 0 < val_fraction < 1:
            raise ConfigError(
                f"digits: val_fraction is {val_fraction}; it must lie between 0 and 1; write 0.2"
            )
        if not 0 <= fold < (folds or 1):
            raise ConfigError(
                f"digits: fold is {fold} of {folds} folds; folds are counted from 0; write "
                "fold: 0, or a larger number of folds"
            )
        self.model, self.width, self.dropout = model, width, dropout
        self.fold, self.folds = fold, folds
        self.val_fraction, self.split_seed = val_fraction, split_seed
        self.use_cross_entropy(
            classes=CLASSES, label_smoothing=label_smoothing, class_weights=class_weights
        )

    def build_model(self) -> nn.Module:
        """Return a model from images (N, 1, 8, 8) to logits (N, 10)."""
        width = self.width
        if self.model == "mlp":
            return nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Dropout(self.dropout),
                nn.Linear(width, CLASSES),
            )
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(8 * width, CLASSES),
        )

    def build_data(self) -> Data:
        """Return images scaled to [0, 1], shape (N, 1, 8, 8), with their classes, shape (N,).

        With `folds`, every image is held out in one of them, and `val_fraction` has no effect.
        """
        pixels, targets = _load()
        images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        classes = torch.as_tensor(targets, dtype=torch.int64)
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(self.split_seed)
        )
        cuts = [max(1, round(self.val_fraction * len(images)))]
        if self.folds is not None:
            cuts = [len(images) * n // self.folds for n in range(1, self.folds)]
        parts = list(order.tensor_split(cuts))
        held_out = parts.pop(self.fold)
        return Data(
            train=_take(torch.cat(parts), images, classes),
            val=_take(held_out, images, classes),
        )


@functools.cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels from 0 to 16, shape (N, 64), and classes, shape (N,); cached in the process.

    Read the file of scikit-learn's `load_digits` directly. Importing scikit-learn would cost each
    worker five seconds, which is longer than a trial trains.
    """
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets/data/digits.csv.gz"
        if file.exists():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits  # finds the data elsewhere, or raises ImportError

    pixels, targets = load_digits(return_X_y=True)
    return pixels, targets


def _take(index: Tensor, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    return images[index], classes[index]
