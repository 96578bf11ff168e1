"""Steady: which tensors of a state only the optimizer's step changes.

A save may copy them beside the next forward and backward pass, for the optimizer waits for it
(Mohan et al., CheckFreq, FAST 2021). What must not live here: how they are copied
(`snapshot.py`), or when (`checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Print = tuple[int, int, Tensor]


class Steady:
    """The optimizer's moments always; a parameter once a first window has left it alone.

    Nothing keeps a model from writing to its own parameters in a forward pass: an embedding
    renormalises its rows, weights are clamped. So each process looks at them before its first
    window and before the step that ends it. What has been written to by then, be it with the same
    bits, is never steady; nor is what the optimizer does not train.

    Args:
        parameters: What the optimizer trains.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._before: list[_Print | None] | None = None
        self._memory: set[int] = set()

    def __call__(self, entry: str, tensor: Tensor) -> bool:
        """Whether a tensor in an entry of the state stays as it is until the optimizer's step."""
        return entry == "optimizer" or tensor.data_ptr() in self._memory

    def look(self) -> None:
        """Remember the parameters as they are before the process's first window."""
        self._before = [_print(p) for p in self._parameters]

    def look_again(self) -> None:
        """Compare them before the optimizer's step. Costs nothing but the first time."""
        before, self._before = self._before, None
        for parameter, then in zip(self._parameters, before or (), strict=before is not None):
            now = _print(parameter)
            # Device synchronisation, once in a process.
            if then and now and then[:2] == now[:2] and torch.equal(then[2], now[2]):
                self._memory.add(parameter.data_ptr())


def _print(parameter: Tensor) -> _Print | None:
    """Where it lies, how often it was written, and the sum of its bits as whole numbers."""
    whole = _WHOLE.get(parameter.element_size())
    if parameter.layout is not torch.strided or whole is None:
        return None
    sum_of_bits = parameter.detach().view(whole).sum(dtype=torch.int64)
    return parameter.data_ptr(), parameter._version, sum_of_bits
