"""Take a state with sharded tensors apart, and put it together again.

A tensor is cut along its first dimension, as FSDP2 does. The parts of a rank are one file, and the
rest is `state.pt`. What must not live here: torch.distributed (`sharding.py`), and files
(`checkpoint.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SHARDED = "gradsweep_sharded"
"""The key of a note: it has the entry's name, the number of the tensor, and its whole shape."""
SHARDS = "shards"
"""The entry of a state with the length and the sha256 of each shard."""

Parts = dict[str, "list[Tensor]"]
"""A rank's parts of the sharded tensors, by the state's entry."""
Replace = Callable[[object], object]


def split(
    state: dict[str, Any], local: Callable[[Tensor], Tensor | None]
) -> tuple[dict[str, Any], Parts]:
    """Return a state with notes in place of its sharded tensors, and this rank's parts of them."""
    from torch import Tensor  # readers of manifests do not need it

    parts: Parts = {}
    known: dict[tuple[str, int], dict[str, Any]] = {}

    def note(entry: str, value: object) -> object:
        part = local(value) if isinstance(value, Tensor) else None
        if part is None:
            return value
        assert isinstance(value, Tensor)
        key = (entry, id(value))
        if key not in known:
            of_entry = parts.setdefault(entry, [])
            known[key] = {SHARDED: [entry, len(of_entry), list(value.shape)]}
            of_entry.append(part)
        return dict(known[key])

    noted = {entry: _mapped(value, partial(note, entry)) for entry, value in state.items()}
    return noted, parts


def filled(
    state: dict[str, Any], make: Callable[[str, int, Sequence[int]], Tensor]
) -> dict[str, Any]:
    """Return a state with tensors in place of its notes."""
    made: dict[tuple[str, int], Tensor] = {}

    def fill(value: object) -> object:
        if not (isinstance(value, dict) and SHARDED in value):
            return value
        entry, number, shape = value[SHARDED]
        if (entry, number) not in made:
            made[entry, number] = make(entry, number, shape)
        return made[entry, number]

    return {entry: _mapped(value, fill) for entry, value in state.items() if entry != SHARDS}


def joined(state: dict[str, Any], shards: Sequence[Parts]) -> dict[str, Any]:
    """Return the whole state, of the parts of all ranks in their order."""

    import torch  # readers of manifests do not need it

    def join(entry: str, number: int, shape: Sequence[int]) -> Tensor:
        parts = [shard[entry][number] for shard in shards]
        return torch.cat([part for part in parts if part.numel()] or parts[:1]).reshape(*shape)

    return filled(state, join)


def cut(whole: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's part of a tensor; it may be empty."""
    rows = -(-len(whole) // size)
    return whole[rank * rows : (rank + 1) * rows]


def largest_part_bytes(tensors: Iterable[Tensor], size: int) -> int:
    """Return the bytes of the parts of the first rank, whose parts are the largest; see `cut`."""
    found = 0
    for tensor in tensors:  # which may be cut already: their shapes are those of the whole ones
        rows, *row = tensor.shape or (1,)
        found += -(-rows // size) * math.prod(row) * tensor.element_size()
    return found


def _mapped(value: Any, change: Replace) -> Any:
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the versions that a module's state dict carries
        for key, part in value.items():
            copied[key] = _mapped(part, change)
        return copied
    if type(value) is list:
        return [_mapped(part, change) for part in value]
    if type(value) is tuple:
        return tuple(_mapped(part, change) for part in value)
    return value
