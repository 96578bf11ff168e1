"""FlatGradients: the gradients of a rank's parameters, added up over the ranks of its trial.

All gradients of one type and device are one tensor, in the order of the parameters, and one
operation adds it up. So each run, resumed or not, adds in the same order and has the same bits.
What must not live here: how a tensor is added up (`collectives.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor


class FlatGradients:
    """The gradients of some parameters. Their memory is kept from step to step: it is large."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._numbers = list(map(id, parameters))
        self._flats = [_Flat(same) for same in by_kind(parameters)]

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether these are the parameters."""
        return self._numbers == list(map(id, parameters))

    @torch.no_grad()
    def add_up(self, add_up: Callable[[Tensor], None], used: Collection[int]) -> None:
        """Let each parameter have the sum of its gradients as its gradient.

        Args:
            add_up: Replaces a tensor by its sum over the ranks.
            used: The ids of the parameters that have a gradient on any rank.
        """
        for flat in self._flats:
            flat.fill()
            add_up(flat.values)
            for p, view in zip(flat.parameters, flat.views, strict=True):
                p.grad = view if id(p) in used else None


class _Flat:
    """The gradients of parameters of one type and device, in one tensor."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        first = parameters[0]
        self.values = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        parts = torch.split(self.values, sizes)
        self.views = [_shaped(part, p) for part, p in zip(parts, parameters, strict=True)]

    def fill(self) -> None:
        """Copy the gradients into the tensor, 0 where there is none."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if len(gradients) < len(self.parameters):
            self.values.zero_()
        pairs = zip(self.parameters, self.views, strict=True)
        if gradients:
            torch._foreach_copy_([view for p, view in pairs if p.grad is not None], gradients)


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups of one type and device, in their order."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a part of a flat tensor in the shape and the layout of a parameter."""
    strides = torch.empty_like(parameter, device="meta").stride()  # without gaps
    return part.as_strided(parameter.shape, strides, part.storage_offset())
