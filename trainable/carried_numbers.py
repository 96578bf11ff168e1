"""CarriedNumbers: some numbers of each rank that travel with a sum of gradients, and not alone.

A sum over ranks of which all but one have zeros leaves the values of that one as they are. So each
rank has a place of its own behind the gradients of a bucket. It writes the bytes of its numbers
there, each as a value from 0 to 255, which every floating type holds exactly. What must not live
here: what the numbers say (`rank_group.py`), and how a bucket is sent (`gradient_sums.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_BYTES = 8
_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CarriedNumbers:
    """The place of the numbers at the end of a tensor that is summed over the ranks.

    Args:
        values: The end of that tensor, of the length that `num_values` returns.
        rank: This rank.
        size: The number of ranks.
        num_numbers: How many numbers each rank has.
    """

    def __init__(self, values: Tensor, rank: int, size: int, num_numbers: int) -> None:
        self._rank = rank
        num_bytes = size * num_numbers * _BYTES
        self._places = values[:num_bytes].view(size, -1)
        self._counts = values[num_bytes:]

    def write(self, numbers: Sequence[float], flags: Sequence[bool]) -> None:
        """Write this rank's numbers, and its flags, of which the ranks that have each are counted.

        The tensor must be sent after that.
        """
        self._places.zero_()
        self._places[self._rank] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
        self._counts.copy_(torch.tensor(flags, dtype=self._counts.dtype))

    def read(self) -> list[float]:
        """Return the sums of the numbers, in float64 and in the order of the ranks, and counts."""
        of_ranks = self._places.to(torch.uint8).view(torch.float64)
        return [*functools.reduce(torch.add, of_ranks).tolist(), *self._counts.tolist()]


def can_carry(tensor: Tensor) -> bool:
    """Return whether numbers can travel with a tensor and be read without waiting for a device."""
    return tensor.device.type == "cpu" and tensor.dtype in _TYPES


def num_values(size: int, num_numbers: int, num_flags: int) -> int:
    """Return how many values the numbers and flags of all ranks take."""
    return size * num_numbers * _BYTES + num_flags
