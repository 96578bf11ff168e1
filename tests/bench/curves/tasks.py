"""The trainings whose curves are recorded: small, and each with a difficulty of its own.

Each reports beside its metrics `val/cpu_seconds`: what the training thread computed since the last
report. Other processes of the machine do not count in it. What must not live here: which
configurations are trained (`points.py`, and the sweep files beside this module).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainable.task import Batch, Data, Task
from trainable.tasks.char_lm import CharLm
from trainable.tasks.digits import CLASSES, Digits


class _Timed(Task):
    """Report the seconds of the training thread as a metric."""

    _began: float | None = None

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """Return the loss, and remember when the first step of an epoch began."""
        self.begin()
        return super().loss(model, batch)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float | Tensor]:
        """Return the metrics, and the seconds of the steps and of this evaluation."""
        metrics = super().evaluate(model, batches)
        return {**metrics, "cpu_seconds": self.end()}

    def begin(self) -> None:
        """Begin to count, unless that was done since the last report."""
        if self._began is None:
            self._began = time.thread_time()

    def end(self) -> float:
        """Return what was computed since the first step after the last report."""
        began, self._began = self._began, None
        return 0.0 if began is None else time.thread_time() - began


class TimedDigits(_Timed, Digits):
    """Classify digits with a CNN."""


class NoisyDigits(_Timed, Digits):
    """Classify digits where a share of the training labels is wrong: fast trainings overfit.

    Args:
        wrong: Share of the training labels that are drawn anew.
        width: Units of each hidden layer.
    """

    def __init__(self, *, wrong: float = 0.3, width: int = 32) -> None:
        super().__init__(model="mlp", width=width)
        self.wrong = wrong

    def build_data(self) -> Data:
        """Return the digits, with noise in the training labels alone."""
        data = super().build_data()
        images, classes = data.train  # type: ignore[misc]
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(CLASSES, classes.shape, generator=generator)
        is_wrong = torch.rand(classes.shape, generator=generator) < self.wrong
        return Data(train=(images, torch.where(is_wrong, drawn, classes)), val=data.val)


class TimedCharLm(_Timed, CharLm):
    """Predict the next byte."""


class Lookup(_Timed):
    """Find what follows a key in a sequence, with an encoder: a plateau, and then sudden progress.

    A sequence is a key and a permutation of all symbols; its class is the symbol behind the key.

    Args:
        symbols: Number of symbols, and length of the permutation.
        samples: Training sequences; a quarter as many validate.
        width: Units of the residual stream.
        layers: Transformer blocks.
    """

    def __init__(
        self, *, symbols: int = 6, samples: int = 2000, width: int = 16, layers: int = 2
    ) -> None:
        self.symbols, self.samples = symbols, samples
        self.width, self.layers = width, layers
        self.use_cross_entropy(classes=symbols)

    def build_model(self) -> nn.Module:
        """Return a model from symbols (N, L) to logits (N, symbols)."""
        return _Encoder(self.symbols, self.width, self.layers)

    def build_data(self) -> Data:
        """Return sequences, shape (N, symbols + 1), and classes."""
        generator = torch.Generator().manual_seed(0)
        return Data(
            train=self._sequences(self.samples, generator),
            val=self._sequences(self.samples // 4, generator),
        )

    def _sequences(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        order = torch.rand(count, self.symbols, generator=generator).argsort(dim=1)
        place = torch.randint(self.symbols - 1, (count, 1), generator=generator)
        key, behind = order.gather(1, place), order.gather(1, place + 1)
        return torch.cat([key, order], dim=1), behind.squeeze(1)


class Friedman(_Timed):
    """Regress Friedman's first function under noise, by plain SGD: large steps diverge to NaN.

    J. Friedman, "Multivariate adaptive regression splines" (1991), section 4.3: ten inputs, of
    which five matter. The target is scaled to a standard deviation of about 1.

    Args:
        samples: Points for training; half as many validate.
        width: Units of each of the two hidden layers.
    """

    def __init__(self, *, samples: int = 600, width: int = 32) -> None:
        self.samples, self.width = samples, width

    def build_model(self) -> nn.Module:
        """Return a model from inputs (N, 10) to values (N, 1)."""
        width = self.width
        return nn.Sequential(
            nn.Linear(10, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )

    def build_data(self) -> Data:
        """Return inputs, shape (N, 10), and noisy values, shape (N, 1)."""
        generator = torch.Generator().manual_seed(0)
        return Data(
            train=self._points(self.samples, generator),
            val=self._points(self.samples // 2, generator),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
        """Return the sum of squared errors, and the number of values."""
        self.begin()
        inputs, values = batch
        return (model(inputs) - values).square().sum(), values.numel()

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float | Tensor]:
        """Return the mean squared error."""
        total: Tensor | float = 0.0
        count = 0
        for inputs, values in batches:
            total = total + (model(inputs) - values).square().sum()
            count += values.numel()
        return {"loss": total / count, "cpu_seconds": self.end()}

    @staticmethod
    def _points(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 10, generator=generator)
        values = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
        values = values + 10 * x[:, 3] + 5 * x[:, 4] + torch.randn(count, generator=generator)
        return x, ((values - 14.4) / 5).unsqueeze(1)


class _Encoder(nn.Module):
    """Embeddings, pre-norm encoder layers, and a linear layer over the mean of all positions."""

    def __init__(self, symbols: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.position = nn.Embedding(symbols + 1, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map symbols (N, L) to logits (N, symbols)."""
        stream: Tensor = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.output(self.norm(stream).mean(dim=1))
        return logits
