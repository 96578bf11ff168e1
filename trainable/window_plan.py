"""Which samples make up which window, and what a run needs to know of it.

What must not live here: orders that a sampler chooses (`samplers.py`), and fetching samples
(`data.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trainable.errors import ConfigError
from trainable.seeding import derive_seed


@dataclass
class WindowPlan:
    """The assignment of samples to windows: pure arithmetic.

    Attributes:
        samples: Samples in the data set when it was built.
        batch_size: Samples of a window, for one optimizer step.
        micro_batch_size: Samples of one forward pass.
        seed: The run's seed.
        drop_last: Leave out the last window of an epoch if it is short.
        shuffle: False keeps the samples in their order (evaluation).
        most: Use only so many samples, the first ones; None: all.
    """

    samples: int
    batch_size: int
    micro_batch_size: int
    seed: int = 0
    drop_last: bool = False
    shuffle: bool = True
    most: int | None = None
    windows: int = field(init=False)
    """Optimizer steps of the first epoch."""
    num_built: int = field(init=False)
    """Samples of the data set when it was built."""

    def __post_init__(self) -> None:
        self.num_built = self.samples
        self.begin(0, self.samples)
        self.samples, self.windows = self._now, self.num_windows(0)

    def begin(self, epoch: int, num_samples: int) -> None:
        """Begin an epoch on a data set that has so many samples now.

        Raises:
            ConfigError: They make no window.
        """
        self._now = num_samples if self.most is None else min(num_samples, self.most)
        if self.num_windows(epoch) == 0:
            raise ConfigError(
                f"{self.batch_size} and there are {self._now} samples; with drop_last no step "
                "remains; lower it or set train.loader.drop_last: false",
                key="train.batch_size",
            )

    resume = begin

    def num_windows(self, epoch: int) -> int:
        """Optimizer steps of the present epoch; the data set may grow from one to the next."""
        del epoch
        whole, rest = divmod(self._now, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def micro_size(self, size: int) -> int:
        """Samples of one forward pass, in a window of `size` samples."""
        del size
        return self.micro_batch_size

    def size(self, window: int) -> int:
        """Samples of a window."""
        return min(self.batch_size, self._now - window * self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Indices of the samples in the order of an epoch (counted from 0), shape (samples,)."""
        if not self.shuffle:
            return torch.arange(self._now)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(self._now, generator=generator)

    def indices(self, epoch: int, start: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the indices of the samples of each window from `start` on, on a device."""
        order = self.order(epoch).to(device)
        for window in range(start, self.num_windows(epoch)):
            first = window * self.batch_size
            yield order[first : first + self.batch_size]


class Plan(Protocol):
    """What a run needs to know of its windows."""

    @property
    def samples(self) -> int:
        """Samples of the first epoch; 0 where a stream does not say."""

    @property
    def batch_size(self) -> int:
        """Samples of a window; 1 where the task decides it."""

    @property
    def windows(self) -> int:
        """Optimizer steps of the first epoch; 0 where a stream does not say."""

    @property
    def num_built(self) -> int:
        """Samples of the data set when it was built; 0 for a stream."""

    def num_windows(self, epoch: int) -> int:
        """Optimizer steps of an epoch; 0 where a stream does not say."""

    def size(self, window: int) -> int:
        """Samples of a window of the current epoch."""


class IndexPlan(Plan, Protocol):
    """What a source of indexed samples needs of a plan: `WindowPlan`, or one with a sampler."""

    @property
    def seed(self) -> int:
        """The run's seed."""

    def begin(self, epoch: int, num_samples: int) -> None:
        """Begin an epoch on a data set that has so many samples now."""

    def resume(self, epoch: int, num_samples: int) -> None:
        """Resume within an epoch that began when the data set had so many samples."""

    def micro_size(self, size: int) -> int:
        """Samples of one forward pass, in a window of `size` samples."""

    def indices(self, epoch: int, start: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the indices of the samples of each window from `start` on, on a device."""


class Position(Protocol):
    """The position in the data, where the number of windows does not say it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the window that was given last: tensors and plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""


def position_of(plan: object) -> Position | None:
    """Return the plan if it has a position to save: a sampler's order."""
    return plan if hasattr(plan, "load_state_dict") else None  # type: ignore[return-value]
