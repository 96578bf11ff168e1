"""Paths to the values below an object: the steps from it to each, and what one can do there.

What must not live here: which values are compared and saved (`object_state.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from trainable.object_values import is_plain_key

Path = tuple[tuple[str, Any], ...]
"""The steps from the root to a value: pairs of a kind of step and a name, key or index."""

_INTERNAL = frozenset(nn.Module().__dict__) - {"training"} | {
    "forward",  # replaced by compilation and activation checkpointing
    "cls_to_become",
}


def members_of(value: Any, kind: str) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Yield the members of a module, an object or a collection, each with the step to it."""
    if kind == "container":
        if isinstance(value, dict):
            for index, (key, part) in enumerate(value.items()):
                yield ("k", key) if is_plain_key(key) else ("v", index), part
        elif not isinstance(value, (set, frozenset)):
            yield from ((("i", index), part) for index, part in enumerate(value))
        return
    if kind == "module":
        yield from ((("p", name), p) for name, p in value._parameters.items() if p is not None)
        yield from ((("b", name), b) for name, b in value._buffers.items())
        yield from ((("m", name), m) for name, m in value._modules.items() if m is not None)
        if type(value).get_extra_state is not nn.Module.get_extra_state:
            yield ("a", "training"), value.training  # get_extra_state() returns the rest
            return
    yield from ((("a", name), part) for name, part in _attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    own = getattr(value, "__dict__", {})
    internal = _INTERNAL if isinstance(value, nn.Module) else ()
    found = {
        name: part
        for name, part in list(own.items())
        if name not in internal
        and not isinstance(getattr(type(value), name, None), functools.cached_property)
    }
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return found


def to_lists(path: Path) -> list[Any]:
    """Return a path as a state has it."""
    return [[step, key] for step, key in path]


def from_lists(entry: list[Any]) -> tuple[Path, str, Any]:
    """Return the path of an entry of a state, its kind and its payload."""
    written, kind, payload = entry
    return tuple((step, key) for step, key in written), kind, payload


def follow(root: Any, path: Path) -> Any:
    """Return the value at a path."""
    for step in path:
        root = member(root, step)
    return root


def member(owner: Any, step: tuple[str, Any]) -> Any:
    """Return the member at a step."""
    kind, key = step
    match kind:
        case "p":
            return owner._parameters[key]
        case "b":
            return owner._buffers[key]
        case "m":
            return owner._modules[key]
        case "i" | "k":
            return owner[key]
        case "v":
            return list(owner.values())[key]
        case _:
            return (
                vars(owner)[key] if key in getattr(owner, "__dict__", {}) else getattr(owner, key)
            )


def has_member(owner: Any, step: tuple[str, Any]) -> bool:
    """Return whether there is a member at a step."""
    try:
        member(owner, step)
    except (LookupError, AttributeError):
        return False
    return True


def put_member(
    owner: Any, step: tuple[str, Any], value: Any, *, persistent: bool | None = None
) -> None:
    """Set a member; `persistent` says where a buffer is saved, None: as before."""
    kind, key = step
    if kind == "b":
        if persistent is None:
            persistent = key not in owner._non_persistent_buffers_set
        vars(owner).pop(key, None)  # a plain attribute of that name
        if key not in owner._buffers:
            owner.register_buffer(key, None)
        owner._buffers[key] = value  # keeps its position among the buffers
        change = owner._non_persistent_buffers_set
        change.discard(key) if persistent else change.add(key)
    elif kind == "v":
        owner[list(owner)[key]] = value
    elif kind in ("i", "k"):
        owner[key] = value
    elif kind == "a" and hasattr(owner, "__dict__"):
        vars(owner)[key] = value
    elif kind == "a":
        object.__setattr__(owner, key, value)
    else:
        raise TypeError("it cannot be replaced")


def remove_member(owner: Any, step: tuple[str, Any]) -> None:
    """Remove a member if it is there."""
    kind, key = step
    if not has_member(owner, step):
        return
    if kind == "b":
        del owner._buffers[key]
        owner._non_persistent_buffers_set.discard(key)
    elif key in getattr(owner, "__dict__", {}):
        del vars(owner)[key]
    else:
        object.__delattr__(owner, key)
