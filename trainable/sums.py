"""Sums of logged values: weighted means and sums, added without waiting for a device.

What must not live here: which names may be logged, and what a sum covers (`logged.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

Over = Literal["step", "epoch"]
Reduce = Literal["mean", "sum"]
Number = float | Tensor
Sums = dict[str, tuple[Number, Number | None]]
"""For each name the sum of its values and the sum of their weights; no weights where the sum
itself is wanted. Plain data and tensors, as a checkpoint holds them."""
FetchedSums = dict[str, tuple[float, float | None]]
"""The same as plain data."""
AnySums = TypeVar("AnySums", Sums, FetchedSums)


def add_value(sums: Sums, name: str, value: Number, weight: Number | None, reduce: Reduce) -> None:
    """Add a value to the sum of its name. Tensors that the sums hold already do not change."""
    total, weights = sums.get(name, (0.0, None))
    if reduce == "sum":
        sums[name] = total + value, None
        return
    share: Number = 1 if weight is None else weight
    weighted = value if weight is None else value * weight
    sums[name] = total + weighted, share if weights is None else weights + share


def means(taken: Iterable[Sums]) -> list[dict[str, float]]:
    """Return the mean or the sum of each name; NaN for a mean whose weights are all 0.

    Device synchronisation: once for each device with values.
    """
    return means_of(fetched(taken))


def means_of(taken: Iterable[FetchedSums]) -> list[dict[str, float]]:
    """Return the mean or the sum of each name; NaN for a mean whose weights are all 0."""
    return [{name: _mean(*pair) for name, pair in sums.items()} for sums in taken]


def fetched(taken: Iterable[Sums]) -> list[FetchedSums]:
    """Return the sums as plain data.

    Device synchronisation: once for each device with values.
    """
    taken = list(taken)
    values = _fetched(number for sums in taken for pair in sums.values() for number in pair)
    pairs = zip(values, values, strict=True)  # in the order of `pair`
    return [{name: _pair(*next(pairs)) for name in sums} for sums in taken]


def combined(of_ranks: Sequence[AnySums]) -> AnySums:
    """Return the sums of all ranks as one; a name counts where it was logged."""
    found = dict(of_ranks[0])
    for sums in of_ranks[1:]:
        for name, (total, weights) in sums.items():
            before, weights_before = found.get(name, (0.0, None))
            if weights is not None and weights_before is not None:
                weights = weights_before + weights
            found[name] = before + total, weights
    return found


def _pair(total: float | None, weights: float | None) -> tuple[float, float | None]:
    assert total is not None
    return total, weights


def _mean(total: float, weights: float | None) -> float:
    if weights is None:
        return total
    return total / weights if weights else math.nan


def _fetched(numbers: Iterable[Number | None]) -> Iterator[float | None]:
    """Yield the numbers as floats, with one transfer for each device."""
    numbers = list(numbers)
    on_device: dict[torch.device, list[Tensor]] = {}
    for number in numbers:
        if isinstance(number, Tensor):
            on_device.setdefault(number.device, []).append(number)
    there = {device: iter(torch.stack(some).tolist()) for device, some in on_device.items()}
    for number in numbers:
        yield next(there[number.device]) if isinstance(number, Tensor) else number
