"""Streams and samplers for runs that are killed: all draw from the host's generators.

What must not live here: the runs (`killed_runs.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from trainable.task import Data

Sample = tuple[Tensor, Tensor]


class Stream(IterableDataset[Sample]):
    """Samples of a data set in their order, a share for each loader process; without a state."""

    def __init__(self, samples: Dataset[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def _share(self) -> range:
        info, count = get_worker_info(), len(self.samples)  # type: ignore[arg-type]
        return range(count) if info is None else range(info.id, count, info.num_workers)

    def __iter__(self) -> Iterator[Sample]:
        return (self.samples[index] for index in self._share())


class ShuffledStream(Stream):
    """The same through a shuffle buffer, whose content is in its state, and over epochs.

    Args:
        samples: The data set.
        size: Of the buffer.
    """

    def __init__(self, samples: Dataset[Sample], size: int = 5) -> None:
        super().__init__(samples)
        self._size = size
        self._position, self._epoch = 0, 0
        self._buffer: list[Any] = []

    def __iter__(self) -> Iterator[Sample]:
        share = self._share()
        while self._position < len(share) or self._buffer:
            while self._position < len(share) and len(self._buffer) < self._size:
                index = (share[self._position] + self._epoch) % len(self.samples)  # type: ignore[arg-type]
                self._buffer.append(self.samples[index])
                self._position += 1
            yield self._buffer.pop(random.randrange(len(self._buffer)))
        self._position, self._epoch = 0, self._epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "epoch": self._epoch, "buffer": list(self._buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._epoch = state["position"], state["epoch"]
        self._buffer = list(state["buffer"])


class Bucketed(Sampler[list[int]]):
    """Batches of unequal sizes in a random order.

    Args:
        samples: Of the data set.
        ragged: Epochs differ in the number of their batches; else each has four of 20 samples.
    """

    def __init__(self, samples: int, *, ragged: bool) -> None:
        self._samples, self._ragged = samples, ragged
        self._generator = numpy.random.default_rng(5)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._generator.permutation(self._samples).tolist()
        sizes = random.sample([3, 4, 5, 8], 4)
        while order:
            count = random.choice(sizes) if self._ragged else sizes.pop()
            yield order[:count]
            order = order[count:]


def sampled(kind: str, train: Any, val: Any) -> Data:
    """Return the data with samples chosen or read in one of several ways."""
    count = len(train[0] if isinstance(train, tuple) else train)
    match kind:
        case "weighted":
            weights = torch.arange(1.0, count + 1).tolist()
            return Data(train, val, sampler=WeightedRandomSampler(weights, count))
        case "bucketed" | "ragged":
            return Data(train, val, batch_sampler=Bucketed(count, ragged=kind == "ragged"))
        case "stream" | "stream-processes":
            read: Any = TensorDataset(*val) if isinstance(val, tuple) else val
            return Data(ShuffledStream(train), Stream(read))
        case "skipped":
            return Data(Stream(train), val)
    return Data(train, val)
