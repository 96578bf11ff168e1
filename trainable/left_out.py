"""LeftOut: the parameters of a model that its optimizer does not have.

What must not live here: what else a task changes (`object_state.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trainable.reachable import tensor_signature


class LeftOut:
    """The values of parameters that the optimizer does not have, such as frozen ones.

    A save has them with the model.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._before: list[object] = []

    def from_now(self, *, lost: str) -> LeftOut:
        """Return one that finds which of them have changed since this call."""
        del lost  # each can be copied
        other = LeftOut(self.parameters)
        other._before = [tensor_signature(one) for one in self.parameters]
        return other

    def state_dict(self) -> list[Any]:
        """Return the number and the value of each that has changed."""
        return [
            [number, one.detach()]
            for number, (one, before) in enumerate(zip(self.parameters, self._before, strict=True))
            if tensor_signature(one) != before
        ]

    def load_state_dict(self, entries: list[Any]) -> None:
        """Copy what `state_dict` returned."""
        for number, value in entries:
            self.parameters[number].detach().copy_(value)
