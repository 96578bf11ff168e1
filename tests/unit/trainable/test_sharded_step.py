"""What the step of a sharded model sends to the other ranks besides gradients."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from trainable.parallel import sharded_step
from trainable.parallel.rank_group import _FIRST_BYTES
from trainable.parallel.sharded_step import UsedParameters
from trainable.ranks import Ranks


class _Other(Ranks):
    """Another rank, which has used the first parameter; keeps the bytes of each message."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[int] = []

    def gather_plain(
        self, value: Any, error: BaseException | None = None, *, seconds: float | None = None
    ) -> list[Any]:
        del error, seconds
        self.sent.append(len(json.dumps([None, value])))
        return [value, "1" + value[1:]]


@pytest.mark.parametrize("number", [3, 4_000])
def test_which_parameters_were_used_is_one_operation(number: int) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.zeros(1)
    places = [(None, "", parameter) for parameter in parameters]
    with (
        patch.object(sharded_step, "sharded_parameters", lambda _: places),
        patch.object(sharded_step, "sharded_units", lambda _: []),
    ):
        used = UsedParameters(nn.Module())
    used._mark(2, parameters[2])
    ranks = _Other()
    used.take(ranks)
    assert [n for n, p in enumerate(parameters) if p.grad is not None] == [0, 2]
    assert len(ranks.sent) == 1
    assert ranks.sent[0] <= _FIRST_BYTES - 8, "a longer message takes a second operation"
