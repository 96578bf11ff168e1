"""Move a batch to a device or pin its memory, whatever its types.

An object with a method `to` moves itself. Mappings, sequences, sets, dataclasses and attrs objects
are copied, with their parts moved. Any other object that holds a tensor is refused: nothing says
how to copy it. Objects without tensors stay as they are. What must not live here: where batches
come from (`data.py`).
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Set
from typing import Any

import numpy
import torch
from torch import Tensor

from trainable.errors import TaskError
from trainable.task import Batch

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.device, torch.dtype, torch.Size}
)
_NOT_ENTERED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
)
"""Types that the search for tensors does not enter: through them it would reach all objects."""
_MAX_OBJECTS_SEARCHED = 10_000
"""After this many objects, the search for a tensor ends, and the object is not moved. If it does
hold a tensor, torch raises when that tensor meets one on the device.
"""


def move(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with every tensor on the device; the types of its parts are kept."""

    def move_part(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(device, non_blocking=True)
        kind: type = type(part)
        if not callable(getattr(kind, "to", None)):
            return NotImplemented
        options = {"non_blocking": True} if _takes_non_blocking(kind) else {}
        moved = part.to(device, **options)
        if moved is None:
            raise TaskError(
                f"{_name(kind)}.to(device) returned None; it must return the moved batch; end it "
                "with `return self`"
            )
        return moved

    return _converted(batch, move_part, _refuse_hidden_tensors)


def pin(batch: Batch) -> Batch:
    """Return the batch with its tensors in pinned memory, for asynchronous copies to a GPU.

    An object with a method `pin_memory` pins itself; one with only `to` stays as it is.
    """

    def pin_part(part: Any) -> Any:
        if isinstance(part, Tensor):
            can_pin = part.device.type == "cpu" and part.layout == torch.strided
            return part.pin_memory() if can_pin else part
        if callable(getattr(type(part), "pin_memory", None)):
            return part.pin_memory()
        return part if callable(getattr(type(part), "to", None)) else NotImplemented

    return _converted(batch, pin_part, lambda _: None)


def _converted(
    batch: Any, convert_part: Callable[[Any], Any], unknown: Callable[[Any], None]
) -> Any:
    """Return a copy of a batch with its parts converted."""
    seen: dict[int, Any] = {}  # keeps shared tensors shared, and ends at cycles
    kept: list[Any] = []  # keeps all parts alive, so that no id is used again

    def convert(part: Any) -> Any:
        kind: type = type(part)
        if kind in _PLAIN:
            return part
        if id(part) not in seen:
            kept.append(part)
            found = convert_part(part)
            seen[id(part)] = inside(part, kind) if found is NotImplemented else found
        return seen[id(part)]

    def inside(part: Any, kind: type) -> Any:
        if kind is dict:
            return {key: convert(value) for key, value in part.items()}
        if kind is list or kind is tuple:
            return kind(convert(value) for value in part)
        if isinstance(part, tuple):
            return attributes(part, _tuple_of(kind, [convert(value) for value in part]))
        if isinstance(part, Mapping):
            return attributes(part, mapping(part))
        if isinstance(part, MutableSequence):
            clone = copy.copy(part)
            seen[id(part)] = clone
            for position, value in enumerate(part):
                clone[position] = convert(value)
            return attributes(part, clone)
        if isinstance(part, Set):
            return kind(convert(value) for value in part)
        if _field_names(kind) is not None or kind is types.SimpleNamespace:
            return attributes(part, copy.copy(part))
        unknown(part)
        return part

    def mapping(part: Mapping[Any, Any]) -> Any:
        clone = copy.copy(part) if hasattr(part, "__setitem__") else None
        if clone is None:
            return type(part)({key: convert(value) for key, value in part.items()})  # type: ignore[call-arg]
        seen[id(part)] = clone
        for key, value in part.items():
            clone[key] = convert(value)
        return clone

    def attributes(part: Any, clone: Any) -> Any:
        """Convert the attributes of a container, a dataclass or an attrs object."""
        seen[id(part)] = clone
        fields = _field_names(part.__class__) or ()
        names = dict.fromkeys((*fields, *getattr(part, "__dict__", ())))
        for name in names:
            if name in getattr(part, "__dict__", ()) or hasattr(part, name):
                value = convert(_held(part, name))
                if value is not _held(clone, name, None):
                    object.__setattr__(clone, name, value)
        return clone

    return convert(batch)


def _held(part: Any, name: str, *default: Any) -> Any:
    own = getattr(part, "__dict__", {})
    return own[name] if name in own else getattr(part, name, *default)


def _tuple_of(kind: type, values: list[Any]) -> Any:
    """Build a tuple of that type without calling its constructor."""
    try:
        return tuple.__new__(kind, values)
    except TypeError:  # a type written in C, such as torch.return_types.max
        return kind(values)


@functools.cache
def _takes_non_blocking(kind: type) -> bool:
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # written in C
        return False
    return "non_blocking" in parameters or any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    )


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a dataclass or an attrs class; None for any other."""
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is not None:
        return tuple(fields)
    attrs = getattr(kind, "__attrs_attrs__", None)
    return tuple(one.name for one in attrs) if attrs is not None else None


def _refuse_hidden_tensors(part: Any) -> None:
    if any(isinstance(held, Tensor) for held in _reached(part)):
        raise TaskError(
            f"the batch holds an object of type {_name(type(part))}, and that holds tensors; only "
            "tensors, mappings, sequences, dataclasses and objects with a method "
            "to(device) are moved to the device; give it a method `def to(self, device, "
            "non_blocking=False)` that returns the moved object, or make it a dataclass"
        )


def _reached(part: Any) -> Iterator[Any]:
    """Yield the objects that an object holds, directly or indirectly."""
    waiting, seen = [part], {id(part)}
    while waiting and len(seen) < _MAX_OBJECTS_SEARCHED:
        current = waiting.pop()
        if isinstance(current, numpy.ndarray) and current.dtype == object:
            held = current.ravel().tolist()
        else:
            held = gc.get_referents(current)
        for one in held:
            if type(one) in _PLAIN or isinstance(one, _NOT_ENTERED) or id(one) in seen:
                continue
            seen.add(id(one))
            yield one
            waiting.append(one)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
