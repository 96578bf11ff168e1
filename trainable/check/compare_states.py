"""Compare two training states entry by entry, bit for bit.

What must not live here: which states are compared, and what a difference means.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ORDER = ("model", "trained_weights", "loop", "outside", "average", "optimizer", "scaler")
"""The entries of a state that a user looks at first; the others follow in the order of names."""
_MEASURED_IN = "progress.metrics."
"""The entry with the metrics of the last report, some of which a clock measures."""


class StateDifference(NamedTuple):
    """An entry in which two states differ, how, and by how much where that can be told."""

    entry: str
    what: str
    largest: float | None = None


def state_differences(
    first: Mapping[str, Any], second: Mapping[str, Any], *, ignored: Collection[str] = ()
) -> Iterator[StateDifference]:
    """Yield the entries in which two states differ, the weights first; synchronises devices."""
    rank = {name: index for index, name in enumerate(_ORDER)}
    names = sorted({*first, *second}, key=lambda name: (rank.get(name, len(rank)), name))
    left_out = {_MEASURED_IN + name for name in ignored}
    for name in names:
        yield from _mapped(name, first, second, name, left_out)


def num_tensors(state: object) -> int:
    """Return how many tensors a state has."""
    if isinstance(state, Tensor):
        return 1
    if isinstance(state, Mapping):
        return sum(map(num_tensors, state.values()))
    return sum(map(num_tensors, state)) if isinstance(state, (list, tuple)) else 0


def _mapped(
    path: str,
    first: Mapping[Any, Any],
    second: Mapping[Any, Any],
    key: Any,
    left_out: Collection[str],
) -> Iterator[StateDifference]:
    """Compare the values under a key of two mappings."""
    if path in left_out:
        return
    if key in first and key in second:
        yield from _differences(path, first[key], second[key], left_out)
    else:
        yield StateDifference(path, "is new" if key in second else "is missing")


def _differences(
    path: str, first: Any, second: Any, left_out: Collection[str]
) -> Iterator[StateDifference]:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        found = _tensor_difference(path, first, second)
        if found is not None:
            yield found
    elif isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in {**first, **second}:
            yield from _mapped(f"{path}.{key}", first, second, key, left_out)
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            yield StateDifference(path, f"has {len(second)} items and had {len(first)}")
            return
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _differences(f"{path}.{index}", one, other, left_out)
    elif path == "objects.pickle":
        if list(operations(first)) != list(operations(second)):
            yield StateDifference(path, "differs: what task, data or model keep has changed")
    elif not _is_same(first, second):
        yield StateDifference(
            path, f"is {second!r:.80} and was {first!r:.80}", _apart(first, second)
        )


def operations(content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield what a pickle does, the same for equal texts as for one text that is used twice."""
    memo: list[tuple[str, Any]] = []
    last: tuple[str, Any] = ("", None)
    num_objects = 0
    for operation, argument, _ in pickletools.genops(content):
        if operation.name == "MEMOIZE":
            is_text = isinstance(last[1], (str, bytes)) and last[0] == "text"
            memo.append(last if is_text else ("object", num_objects))
            num_objects += not is_text
        elif operation.name != "FRAME":
            if operation.name.endswith("BINGET"):
                last = memo[argument]  # type: ignore[index]
            elif isinstance(argument, (str, bytes)):
                last = ("text", argument)
            else:
                last = (operation.name, argument)
            yield last


def _tensor_difference(path: str, first: Tensor, second: Tensor) -> StateDifference | None:
    one, other = (_on_host(tensor) for tensor in (first, second))
    kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (one, other)]
    if kinds[0] != kinds[1]:
        return StateDifference(path, f"is {kinds[1]} and was {kinds[0]}")
    if torch.equal(_bits(one), _bits(other)):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    before, now = one.to(wide), other.to(wide)
    apart = (now - before).abs()
    count = int((_elements(one) != _elements(other)).any(dim=-1).sum())
    numbers = apart[~apart.isnan()]
    largest = float(numbers.max()) if numbers.numel() else None
    return StateDifference(path, f"differs in {count} of {one.numel()} values", largest)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor as a dense one in host memory."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()  # device synchronisation


def _elements(tensor: Tensor) -> Tensor:
    """Return the bytes of each element, a row each."""
    return _bits(tensor).reshape(tensor.numel(), -1)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)  # NaN equals itself, and 0.0 is not -0.0


def _is_same(first: object, second: object) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return struct.pack("d", first) == struct.pack("d", second)
    return type(first) is type(second) and bool(first == second)


def _apart(first: object, second: object) -> float | None:
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return abs(float(second) - float(first))
    return None
