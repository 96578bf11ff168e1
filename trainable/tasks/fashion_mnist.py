"""Classify clothes with FashionMNIST: 28x28 grey images, ten classes; read by torchvision."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainable.errors import ConfigError
from trainable.task import Data, Task

CLASSES = 10

# Mean and standard deviation of the official training images, scaled to [0, 1].
_MEAN, _STD = 0.2860, 0.3530
_FOLDER = Path("FashionMNIST", "raw")
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class FashionMnist(Task):
    """Classify 60,000 images of clothes: 80 % for training, 20 % for validation.

    The images are tensors in memory (188 MB as floats), so no loader process is needed. The 10,000
    images of the official test set are for `sweep audit --test` alone; no trial loads them.
    """

    def __init__(
        self,
        *,
        data_dir: str = "~/.cache/gradsweep",
        download: bool = True,
        width: int = 16,
        hidden: int = 128,
        dropout: float = 0.0,
        split_seed: int = 0,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        for name, value in (("width", width), ("hidden", hidden)):
            if value < 1:
                raise ConfigError(f"fashion_mnist: {name} is {value}; it must be at least 1")
        if not 0 <= dropout < 1:
            raise ConfigError(f"fashion_mnist: dropout is {dropout}; it must lie in [0, 1)")
        self.root, self.download = Path(data_dir).expanduser().resolve(), download
        self.width, self.hidden, self.dropout = width, hidden, dropout
        self.split_seed = split_seed
        self.use_cross_entropy(
            classes=CLASSES, label_smoothing=label_smoothing, class_weights=class_weights
        )

    def build_model(self) -> nn.Module:
        """Return a model from images (N, 1, 28, 28) to logits (N, 10)."""
        width = self.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, self.hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, CLASSES),
        )

    def build_data(self) -> Data:
        """Return normalised images, shape (N, 1, 28, 28), with their classes, shape (N,)."""
        _provide(self.root, self.download)
        # Imported after the check: a missing file is then reported without the slow import.
        from torchvision.datasets import FashionMNIST

        images, classes = _tensors(FashionMNIST(self.root, train=True))
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(self.split_seed)
        )
        held_out = max(1, len(images) // 5)
        return Data(
            train=_take(order[held_out:], images, classes),
            val=_take(order[:held_out], images, classes),
            test=lambda: _tensors(FashionMNIST(self.root, train=False)),
        )


def _tensors(files: Any) -> tuple[Tensor, Tensor]:
    images = files.data.unsqueeze(1).float().div_(255).sub_(_MEAN).div_(_STD)
    return images, files.targets.to(torch.int64)


def _take(index: Tensor, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    return images[index], classes[index]


def _provide(root: Path, download: bool) -> None:
    """Make sure that all four files are below `root`, unpacked.

    Trials of one sweep start at the same time, and any of them may be killed. Files are therefore
    written to a temporary directory and renamed one by one: a file that exists is complete.
    """
    raw = root / _FOLDER
    missing = _missing(raw)
    if not missing:
        return
    unpackable = [name for name in missing if (raw / f"{name}.gz").exists()]
    if not download and unpackable != missing:
        raise ConfigError(
            f"{raw} lacks {', '.join(missing)} and download is false; put the files there "
            "(packed as .gz or not), set task.data_dir to where they are, or write "
            "task.download: true",
            key="task.data_dir",
        )
    from torchvision.datasets import FashionMNIST
    from torchvision.datasets.utils import extract_archive

    try:
        raw.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetching-") as aside:
            if unpackable == missing:
                for name in missing:
                    extract_archive(str(raw / f"{name}.gz"), aside)
                source = Path(aside)
            else:
                FashionMNIST(aside, train=True, download=True)
                source = Path(aside) / _FOLDER
            for name in missing:
                os.replace(source / name, raw / name)
    except (OSError, RuntimeError) as problem:  # torchvision raises RuntimeError without network
        raise ConfigError(
            f"{', '.join(missing)} could not be downloaded or unpacked to {raw} ({problem}); put "
            "the files there (packed as .gz or not), or set task.data_dir to where they are",
            key="task.data_dir",
        ) from problem


def _missing(raw: Path) -> list[str]:
    return [name for name in _FILES if not (raw / name).exists()]
