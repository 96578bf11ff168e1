"""Numbers of all ranks come out of a sum of gradients as they went in."""

from __future__ import annotations

import math

import pytest
import torch

from trainable.parallel.gradient_sums import CarriedNumbers, can_carry, num_values

NUMBERS = [
    [0.1, 1e300, -0.0, 5e-324, math.inf, 3.0],
    [0.2, 1e-300, 0.0, 0.0, -math.inf, math.nan],
    [0.3, -1e300, 7.0, 0.0, 0.0, 1.0],
]
FLAGS = [[True, False, True], [True, False, False], [True, False, False]]


def carried(kind):
    """Return what is read on each rank after the sum."""
    length = num_values(3, 6, 3)
    ends = [torch.full((length,), 9.0, dtype=kind) for _ in NUMBERS]  # of the step before
    numbers = [CarriedNumbers(end, rank, 3, 6) for rank, end in enumerate(ends)]
    for own, values, flags in zip(numbers, NUMBERS, FLAGS, strict=True):
        own.write(values, flags)
    total = ends[0] + ends[1] + ends[2]
    for end in ends:
        end.copy_(total)
    return [own.read() for own in numbers]


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_added_in_float64_on_each_rank(kind):
    found = carried(kind)
    for *first, inf, nan in (read[:6] for read in found):
        assert first == [0.1 + 0.2 + 0.3, 1e300 + 1e-300 - 1e300, 7.0, 5e-324]
        assert math.isnan(inf)
        assert math.isnan(nan)
    assert [read[6:] for read in found] == [[3, 0, 1]] * 3


def test_numbers_travel_only_where_they_are_exact():
    assert can_carry(torch.zeros(1))
    assert not can_carry(torch.zeros(1, dtype=torch.complex64))
    assert not can_carry(torch.zeros(1, device="meta"))
