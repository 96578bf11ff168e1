"""Compare, encode and restore single values.

These are numbers, tensors, arrays, collections of them, random generators, and objects with a
`state_dict()`. What must not live here: where the values are found (`object_state.py`).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import io
import marshal
import os
import random
import re
import sys
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainable.errors import CheckpointError

Stored = dict[int, object]

_SCALARS = (int, float, complex, str, bytes, bool, type(None))
_TORCH = (torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_REBUILDABLE = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, Counter)
STATEFUL_KINDS = ("generator", "holder", "file", "iterator")
_PROCESS_PACKAGES = (
    frozenset(sys.stdlib_module_names) - {"collections", "types", "argparse"}  # a Namespace
    | {"mlflow", "ray", "optuna", "wandb", "trainable", "sweeps"}
)
"""Packages whose objects belong to a process: threads, sockets, loggers, clients."""
_ITERATORS = frozenset({"builtins", "itertools", "torch"})
_NUMPY_GENERATORS = (
    numpy.random.Generator,
    numpy.random.RandomState,
    numpy.random.BitGenerator,
)


def value_kind(value: object) -> str:
    """Return how a value is compared and saved.

    `value`: as a whole. `tensor`: restored in place. `container`, `object`, `module`: by members.
    `generator`, `holder`, `file`, `iterator`: by a state that it has. `opaque`: ignored.
    """
    if type(value) in _SCALARS or type(value) in _TORCH or isinstance(value, enum.Enum):
        return "value"
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, numpy.generic):
        return "value"
    if isinstance(value, numpy.ndarray):
        # a read-only array cannot change, and a memory map belongs to a file
        constant = not value.flags.writeable or isinstance(value, numpy.memmap)
        return "opaque" if constant or value.dtype.kind not in "biufc" else "value"
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, (torch.Generator, random.Random, *_NUMPY_GENERATORS)):
        return "generator"
    if isinstance(value, type) or inspect.ismodule(value) or inspect.isroutine(value):
        return "opaque"
    if isinstance(value, _CONTAINERS):
        return "container"
    if isinstance(value, (int, float, complex, str, bytes)):  # an object of a derived class
        return "value"
    # look at the type: an object's __getattr__ may accept any name
    if callable(getattr(type(value), "state_dict", None)) and callable(
        getattr(type(value), "load_state_dict", None)
    ):
        return "holder"
    if isinstance(value, io.IOBase):
        return "file"
    package = type(value).__module__.partition(".")[0]
    if hasattr(type(value), "__next__") and package in _ITERATORS:
        return "iterator"
    has_parts = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    return "opaque" if package in _PROCESS_PACKAGES or not has_parts else "object"


def is_plain_key(key: object) -> bool:
    """Whether a dict's key can be saved."""
    return type(key) in _SCALARS or (isinstance(key, tuple) and all(map(is_plain_key, key)))


def is_rebuildable(value: Any, stored: Stored, *, large: bool = False) -> bool:
    """Whether a value and all its members can be rebuilt from plain data.

    Args:
        value: Any value.
        stored: Tensors that must not be replaced, because they are saved elsewhere.
        large: Check only the first members of a long collection.
    """
    if value_kind(value) == "value":
        return True
    if isinstance(value, Tensor):
        return id(value) not in stored and not isinstance(value, nn.Parameter)
    if type(value) not in _REBUILDABLE:
        return False
    if marshal_digest(value) is not None:
        return True
    if isinstance(value, dict):
        return all(map(is_plain_key, value)) and all(
            is_rebuildable(v, stored) for v in value.values()
        )
    if isinstance(value, (set, frozenset)):
        return False
    if large and len(value) > 1000:
        return all(is_rebuildable(one, stored) for one in list(value)[:10])
    return all(is_rebuildable(one, stored) for one in value)


def marshal_digest(value: Any) -> bytes | None:
    """Return a digest of a collection of plain values, fast in C; None for other values."""
    try:
        # version 2: later versions depend on how often an object is referenced
        content = marshal.dumps(value, 2)
    except (ValueError, RecursionError):
        return None
    return hashlib.sha256(content).digest()


def told_of(kind: str, value: Any, signature: object) -> str:
    """Return what a value is as text, without what may differ from process to process.

    That is where an object lies in memory, the number of a device, all of a path below the
    directory of temporary files, and of another absolute path all but the name.
    """
    if kind in ("generator", "holder"):
        return _told(get_internal_state(value))
    return _told(value) if kind == "value" else _ADDRESS.sub("", repr(signature))


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _told(value: Any) -> str:
    if isinstance(value, (Tensor, numpy.ndarray)):
        return repr(signature_of(value))
    if isinstance(value, _CONTAINERS):
        parts: Any = value.items() if isinstance(value, dict) else value
        told = [_told(part) for part in parts]
        is_set = isinstance(value, (set, frozenset))
        return f"{type(value).__name__} {sorted(told) if is_set else told}"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, str) and os.path.isabs(value):
        is_temporary = Path(value).is_relative_to(tempfile.gettempdir())
        return "" if is_temporary else Path(value).name
    return _ADDRESS.sub("", repr(value))


def digest_of(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def signatures_equal(first: object, second: object) -> bool:
    """Whether two signatures are equal; None is equal to nothing."""
    return first is not None and first == second


def signature_of(value: Any) -> object:
    """Return a signature that differs if the value differs; None if there can be none."""
    if isinstance(value, Tensor):
        return _sign_tensor(value)
    if isinstance(value, numpy.ndarray):
        whole = numpy.ascontiguousarray(value)
        return ("array", value.shape, str(value.dtype), hashlib.sha256(whole.tobytes()).digest())
    kind = value_kind(value)
    if kind == "value":
        return type(value).__qualname__, repr(value)
    if kind == "container":
        digest = marshal_digest(value)
        if digest is not None:
            return type(value).__qualname__, digest
        items = list(value.items()) if isinstance(value, dict) else list(value)
        return type(value).__qualname__, tuple(
            (repr(one[0]), signature_of(one[1])) if isinstance(value, dict) else signature_of(one)
            for one in items
        )
    if kind == "file":
        return "file", _position(value)
    if kind == "iterator":
        return _sign_iterator(value)
    if kind in ("generator", "holder"):
        return kind, _sign_state(get_internal_state(value))
    return kind, id(value)


def _sign_state(state: Any) -> object:
    if isinstance(state, dict):
        return tuple((repr(key), _sign_state(value)) for key, value in state.items())
    if isinstance(state, (list, tuple)):
        return tuple(map(_sign_state, state))
    return signature_of(state) if isinstance(state, (Tensor, numpy.ndarray)) else repr(state)


def _sign_tensor(tensor: Tensor) -> object:
    """Return a sum over all bits, in their order; torch does not count writes through `.data`."""
    found = tensor.detach()
    if found.layout is not torch.strided or found.is_quantized or is_meta(found):
        return None
    form = (tuple(found.shape), str(found.dtype))
    if not found.numel():
        return form
    found = found.resolve_conj().resolve_neg()
    if found.is_complex():
        found = torch.view_as_real(found)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = found.contiguous().reshape(-1).view(kinds[found.itemsize])
    # Device synchronisation at each save, for each of a task's tensors on a device.
    return *form, _sum_in_order(bits)


_BLOCK = 1 << 16
"""Numbers that have a weight each; few enough for a processor's cache."""


def _sum_in_order(numbers: Tensor) -> int:
    """Return a sum of whole numbers, modulo 2**64, that depends on the order of any two."""
    weights = _weights(numbers.device)
    while True:
        blocks = [numbers[at : at + _BLOCK] for at in range(0, len(numbers), _BLOCK)]
        sums = [(block.to(torch.int64) * weights[: len(block)]).sum() for block in blocks]
        if len(sums) == 1:
            return int(sums[0])
        numbers = torch.stack(sums)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(-(1 << 62), 1 << 62, (_BLOCK,), generator=generator, device="cpu")
    return (2 * drawn + 1).to(device)  # odd: no change of a single number is lost


def is_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on torch's meta device, where it has a shape but no values."""
    return tensor.device.type == "meta"


def _sign_iterator(value: Any) -> object:
    """Return the position of an iterator; None if it has no readable position."""
    if inspect.isgenerator(value):
        state = inspect.getgeneratorstate(value)
        fixed = (inspect.GEN_CREATED, inspect.GEN_CLOSED)
        return ("generator", state) if state in fixed else None
    if hasattr(value, "_num_yielded"):  # a data loader's
        return "loader", value._num_yielded
    try:
        parts = value.__reduce__()
    except TypeError:
        return None
    return tuple(
        _sign_iterator(part) if hasattr(part, "__next__") else repr(part)
        for whole in parts
        for part in (whole if isinstance(whole, tuple) else (whole,))
    )


def _position(file: Any) -> object:
    """Return the position of a readable file; "none" for others, which a run does not read."""
    if file.closed or not file.readable() or not file.seekable():
        return "none"
    try:
        return file.tell()
    except OSError:  # a text file has no position while its lines are iterated over
        return None


# Saving and restoring


def get_internal_state(value: Any) -> Any:
    """Return the internal state of a generator, file or `state_dict()` object, or None."""
    match value:
        case torch.Generator():
            return value.get_state()
        case random.Random():
            version, internal, gauss = value.getstate()
            return [version, torch.tensor(internal, dtype=torch.int64), gauss]
        case numpy.random.RandomState():
            return _tensors(value.get_state(legacy=False))
        case numpy.random.Generator():
            return _tensors(value.bit_generator.state)
        case numpy.random.BitGenerator():
            return _tensors(value.state)
        case io.IOBase():
            return _position(value)
    return value.state_dict() if value_kind(value) == "holder" else None


def set_internal_state(value: Any, state: Any) -> None:
    """Restore what `get_internal_state` returned."""
    match value:
        case torch.Generator():
            value.set_state(state.cpu())
        case random.Random():
            value.setstate((state[0], tuple(state[1].tolist()), state[2]))
        case numpy.random.RandomState():
            value.set_state(_arrays(state))
        case numpy.random.Generator():
            value.bit_generator.state = _arrays(state)
        case numpy.random.BitGenerator():
            value.state = _arrays(state)
        case io.IOBase():
            if isinstance(state, int):
                value.seek(state)
        case _:
            value.load_state_dict(state)


def _tensors(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _tensors(value) for key, value in state.items()}
    if isinstance(state, numpy.ndarray):
        return {"array": str(state.dtype), "bytes": state.tobytes()}
    return state.item() if isinstance(state, numpy.generic) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, dict) and state.keys() == {"array", "bytes"}:
        return numpy.frombuffer(state["bytes"], dtype=state["array"]).copy()
    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    return state


def tensor_entry(tensor: Tensor, persistent: bool | None = None) -> dict[str, Any]:
    """Return a tensor's values with its flags."""
    entry: dict[str, Any] = {
        "value": tensor.detach(),
        "requires_grad": tensor.requires_grad and tensor.is_leaf,
        "on_device": tensor.device.type != "cpu",
    }
    return entry if persistent is None else entry | {"persistent": persistent}


def restore_tensor(live: object, entry: dict[str, Any], device: torch.device) -> Tensor:
    """Return a tensor with an entry's values: the live tensor if they fit, else a new one."""
    value: Tensor = entry["value"].detach()
    if isinstance(live, Tensor) and _fits(live, value):
        with torch.no_grad():
            live.copy_(value)
        tensor = live
    else:
        where = device if entry["on_device"] else torch.device("cpu")
        tensor = value.to(where, copy=True)
        if isinstance(live, nn.Parameter):
            raise ValueError(f"it has the shape {list(live.shape)}, not {list(value.shape)}")
    if tensor.is_leaf and tensor.requires_grad != entry["requires_grad"]:
        tensor.requires_grad_(entry["requires_grad"])
    return tensor


def _fits(live: Tensor, value: Tensor) -> bool:
    if type(live) not in (Tensor, nn.Parameter, nn.Buffer) or live.is_inference():
        return False
    dense = live.layout is value.layout is torch.strided
    form = live.shape == value.shape and live.dtype == value.dtype and not live.is_quantized
    return dense and form and not has_overlap(live) and live.is_leaf and not is_meta(live)


def has_overlap(tensor: Tensor) -> bool:
    """Whether several elements share memory, as in an expanded tensor."""
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def encode(value: Any) -> Any:
    """Return a value as tensors and plain data, with names for other types."""
    match value:
        case enum.Enum():
            return {"enum": value.name}
        case Tensor():
            return {"tensor": tensor_entry(value)}
        case numpy.ndarray():
            return {
                "array": torch.from_numpy(numpy.ascontiguousarray(value).copy())
                if value.dtype.kind != "u" or value.dtype.itemsize == 1
                else value.tobytes(),
                "dtype": str(value.dtype),
                "shape": list(value.shape),
            }
        case numpy.generic():
            return {"number": value.item(), "dtype": str(value.dtype)}
        case dict():
            form = type(value).__name__
            return {form: [[key, encode(part)] for key, part in value.items()]}
        case deque():
            return {"deque": [encode(part) for part in value], "maxlen": value.maxlen}
        case set() | frozenset():
            return {type(value).__name__: sorted(value, key=repr)}
        case list() | tuple() if type(value) in (list, tuple):
            return {type(value).__name__: [encode(part) for part in value]}
    return value


def decode(written: Any, live: Any, device: torch.device) -> Any:
    """Return the value that `encode` wrote; restore into the live object if the types match."""
    if not isinstance(written, dict):
        return written
    form, content = next(iter(written.items()))
    match form:
        case "enum":
            return type(live)[content]
        case "tensor":
            return restore_tensor(live, content, device)
        case "array":
            array = _array(content, written)
            if (
                isinstance(live, numpy.ndarray)
                and live.flags.writeable
                and (live.shape, live.dtype) == (array.shape, array.dtype)
            ):
                live[...] = array
                return live
            return array
        case "number":
            return numpy.dtype(written["dtype"]).type(content)
        case "tuple":
            return tuple(_decoded(content, live, tuple, device))
        case "list" | "deque":
            kind = list if form == "list" else deque
            parts = _decoded(content, live, kind, device)
            if type(live) is kind and getattr(live, "maxlen", None) == written.get("maxlen"):
                live.clear()
                live.extend(parts)
                return live
            return list(parts) if kind is list else deque(parts, written["maxlen"])
        case "set" | "frozenset":
            if form == "set" and type(live) is set:
                live.clear()
                live.update(content)
                return live
            return set(content) if form == "set" else frozenset(content)
    return _decoded_dict(form, content, live, device)


def _decoded(content: list[Any], live: Any, kind: Any, device: torch.device) -> list[Any]:
    there: list[Any] = list(live) if isinstance(live, kind) else []
    there += [None] * (len(content) - len(there))
    return [decode(part, one, device) for part, one in zip(content, there, strict=False)]


def _decoded_dict(form: str, content: list[Any], live: Any, device: torch.device) -> Any:
    there = live if isinstance(live, dict) else {}
    made = {key: decode(part, there.get(key), device) for key, part in content}
    if type(live).__name__ == form:
        live.clear()
        live.update(made)
        return live
    kinds = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
    if form not in kinds:
        raise CheckpointError(f"it is a {form}, which was made after the task was built")
    return kinds[form](made)


def _array(content: Any, written: dict[str, Any]) -> numpy.ndarray[Any, Any]:
    if isinstance(content, bytes):
        flat = numpy.frombuffer(content, dtype=written["dtype"]).copy()
    else:
        flat = content.cpu().numpy().astype(written["dtype"])
    return flat.reshape(written["shape"])
