"""How each kind of object that a run's code can reach is read, compared and restored in place.

Almost all follow Python's own protocol, `__reduce_ex__`: what pickle would save of an object, and
how it would give it back. The others are what the protocol cannot restore in place (tensors,
arrays, containers), does not see (closures, module globals, class attributes) or what declares its
state itself (`state_dict`). What must not live here: which objects a run has, and when they are
saved (`object_state.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import enum
import inspect
import io
import marshal
import mmap
import sys
import threading
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import SemLock
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from trainable.user_code.task_import import is_users_module

ATOMS = (int, float, complex, bool, type(None), type(Ellipsis), bytes, str)
"""Types whose values are never shared and cannot change."""
_ATOMS = frozenset(ATOMS)
_CONSTANTS = (torch.dtype, torch.device, torch.Size, range, slice, numpy.generic, RemovableHandle)
_QUEUES = frozenset({"queue", "_queue"})
_OF_A_PROCESS = _QUEUES | {"threading", "_thread", "concurrent", "asyncio"}
"""Packages whose objects belong to a process, even where pickle would take them."""
_WITHOUT_STATE = _OF_A_PROCESS - _QUEUES | {"weakref", "typing", "_multiprocessing"}
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"} | {
    "forward",  # replaced by compilation and activation checkpointing
    "cls_to_become",
}
_GLOBALS_LEFT_OUT = frozenset({"In", "Out", "_", "get_ipython", "exit", "quit"})  # of a notebook

Part = tuple[str, Any]
"""A step to a part of an object, as text, and the part."""


class Kind:
    """How objects of one kind are read and restored; the base is for those without a state.

    An object has attributes, each compared and saved by itself, and a further state.
    """

    def attributes(self, value: Any) -> dict[str, Any]:  # noqa: ARG002  of those that have some
        """Return the attributes by name."""
        return {}

    def parts(self, value: Any) -> Iterator[Part]:
        """Yield the objects that this one refers to."""
        yield from ((f".{name}", part) for name, part in self.attributes(value).items())

    def read(self, value: Any) -> Any:
        """Return the further state, which refers to the parts. It is not a copy."""

    def write(self, value: Any, state: Any) -> None:
        """Restore in place what `read` returned."""

    def put(self, value: Any, name: str, part: Any) -> None:
        """Set an attribute."""
        if hasattr(value, "__dict__") and not _is_slot(value, name):
            vars(value)[name] = part
        else:
            object.__setattr__(value, name, part)

    def remove(self, value: Any, name: str) -> None:
        """Remove an attribute if it is there."""
        if name in getattr(value, "__dict__", {}) and not _is_slot(value, name):
            del vars(value)[name]
        elif hasattr(value, name):
            object.__delattr__(value, name)

    def arguments(self, value: Any) -> Any:
        """Return what an object is made from, which cannot be restored in place."""

    def content(self, value: Any) -> dict[str, Any]:
        """Return the attributes by name, and the further state by the name ""."""
        return {**self.attributes(value), "": self.read(value)}


class _Attributes(Kind):
    """An object whose state is its attributes."""

    def attributes(self, value: Any) -> dict[str, Any]:
        return _named(value)


class _Container(_Attributes):
    """A list, deque or set; a class of the user's may give others by its methods.

    The members of a set have no order by which a resumed run finds them again: they are no parts,
    and are saved with it.
    """

    def __init__(self, builtin: Any) -> None:
        self._builtin = builtin

    def parts(self, value: Any) -> Iterator[Part]:
        if self._builtin in (list, deque):
            yield from ((f"[{index}]", part) for index, part in enumerate(self.read(value)))
        yield from super().parts(value)

    def read(self, value: Any) -> Any:
        return list(self._builtin.__iter__(value))

    def write(self, value: Any, state: Any) -> None:
        self._builtin.clear(value)
        add = self._builtin.update if self._builtin is set else self._builtin.extend
        add(value, state)


class _Bytes(_Attributes):
    """A bytearray, or memory that was mapped to be written to."""

    def read(self, value: Any) -> Any:
        return bytes(memoryview(value))

    def write(self, value: Any, state: Any) -> None:
        value[:] = state  # in place: there may be views of it


class _Dict(_Attributes):
    def parts(self, value: Any) -> Iterator[Part]:
        for index, (key, part) in enumerate(dict.items(value)):
            if type(key) in ATOMS:
                yield f"[{key!r}]", part
            else:
                yield f".keys[{index}]", key
                yield f".values[{index}]", part
        yield from super().parts(value)

    def read(self, value: Any) -> Any:
        return list(dict.items(value))

    def write(self, value: Any, state: Any) -> None:
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        for key, part in state:
            kind.__setitem__(value, key, part)


class _ByValue(Kind):
    """A tuple, or an object that pickle makes from its arguments alone.

    It is saved with what refers to it.
    """

    def parts(self, value: Any) -> Iterator[Part]:
        if isinstance(value, tuple):
            yield from ((f"[{index}]", part) for index, part in enumerate(value))
        else:
            yield from _parts_of_reduced(value)


class _File(Kind):
    """A readable file: its position."""

    def read(self, value: Any) -> Any:
        if value.closed or not value.readable() or not value.seekable():
            return None
        try:
            return value.tell()
        except OSError:  # a text file has no position while its lines are iterated over
            return None

    def write(self, value: Any, state: Any) -> None:
        if state is not None:
            value.seek(state)


class _Iterator(Kind):
    """An iterator that pickle refuses: its position is compared, and cannot be restored."""

    def read(self, value: Any) -> Any:
        frame = getattr(value, "gi_frame", None)
        where = None
        if frame is not None:
            own = {name: part for name, part in frame.f_locals.items() if type(part) in ATOMS}
            where = frame.f_lasti, own
        state = inspect.getgeneratorstate(value) if inspect.isgenerator(value) else None
        return where, getattr(value, "_num_yielded", None), state

    def write(self, value: Any, state: Any) -> None:
        raise ValueError(f"no position of {value!r} can be restored, as {state!r}")


class _Memory(Kind):
    """A value of ctypes, which other processes may share, as one of `multiprocessing.Value` is."""

    def read(self, value: Any) -> Any:
        return bytes(value)

    def write(self, value: Any, state: Any) -> None:
        ctypes.memmove(ctypes.addressof(value), state, len(state))


class _Variable(Kind):
    """A context variable: its value where the run trains."""

    def attributes(self, value: Any) -> dict[str, Any]:
        try:
            return {"value": value.get()}
        except LookupError:
            return {}

    def put(self, value: Any, name: str, part: Any) -> None:  # noqa: ARG002
        value.set(part)


class _View(Kind):
    """A read-only view of a mapping, or one of memory: what it shows."""

    def parts(self, value: Any) -> Iterator[Part]:
        if isinstance(value, memoryview):
            yield ".obj", value.obj
        else:
            yield from ((f"[{key!r}]", part) for key, part in value.items())


class _Array(Kind):
    def read(self, value: Any) -> Any:
        return torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)

    def write(self, value: Any, state: Any) -> None:
        content = state.numpy().tobytes()[: value.nbytes]
        value[...] = numpy.ndarray(value.shape, value.dtype, content)

    def arguments(self, value: Any) -> Any:
        return value.shape, value.dtype.str


class _Tensor(Kind):
    """A tensor: its values and gradient, unless they are saved elsewhere, and its attributes."""

    def __init__(self, *, is_saved: bool) -> None:
        self._is_saved = is_saved

    def attributes(self, value: Any) -> dict[str, Any]:
        found = attributes_of(value)
        if self._is_saved:  # each step begins without a gradient
            found.pop("grad", None)
        return found

    def read(self, value: Any) -> Any:
        return None if self._is_saved else value.detach(), is_trained(value)

    def write(self, value: Any, state: Any) -> None:
        new, trains = state
        if isinstance(new, Tensor):
            with torch.no_grad():
                form = None if is_lazy(value) else (value.shape, value.dtype)
                if form == (new.shape, new.dtype) and not has_overlap(value):
                    value.copy_(new)
                else:
                    value.data = new.to(value.device, copy=True)
        if value.is_leaf and value.requires_grad != trains:  # a lazy one refuses an equal value
            value.requires_grad_(trains)

    def put(self, value: Any, name: str, part: Any) -> None:
        if name == "grad":
            value.grad = part
        else:
            super().put(value, name, part)


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the gradient and what code has set on a tensor; a subclass keeps its own there."""
    if not is_plain(tensor):
        return {}
    found = {name: part for name, part in vars(tensor).items() if not name.startswith("_dynamo")}
    gradient = tensor.grad if is_trained(tensor) else None
    return found if gradient is None else {**found, "grad": gradient}


class _Module(Kind):
    """A module: attributes, buffers that no `state_dict()` has, and which members it has."""

    def attributes(self, value: Any) -> dict[str, Any]:
        if _has_extra(value):
            return {"training": value.training}  # get_extra_state() returns the rest
        return {
            name: part
            for name, part in vars(value).items()
            if name not in _INTERNAL
            and not name.startswith("__composable_api_")  # FSDP's
            and not isinstance(part, RemovableHandle)
        }

    def parts(self, value: Any) -> Iterator[Part]:
        for members in (value._parameters, value._buffers, value._modules):
            yield from ((f".{name}", one) for name, one in members.items() if one is not None)
        yield from ((f".hooks[{n}]", hook) for n, hook in enumerate(hooks_of(value)))
        yield from super().parts(value)

    def read(self, value: Any) -> Any:
        hidden = value._non_persistent_buffers_set
        buffers = {
            name: (one if name in hidden or one is None else _form(one))
            for name, one in value._buffers.items()
        }
        extra = value.get_extra_state() if _has_extra(value) else None
        becomes = getattr(value, "cls_to_become", None)
        return buffers, sorted(hidden), extra, None if becomes is None else becomes.__qualname__

    def write(self, value: Any, state: Any) -> None:
        buffers, hidden, extra, _ = state
        if extra is not None:
            value.set_extra_state(extra)
        for name in [name for name in value._buffers if name not in buffers]:
            del value._buffers[name]
        for name, new in buffers.items():
            vars(value).pop(name, None)  # a plain attribute of that name
            live = value._buffers.get(name)
            if isinstance(new, tuple):
                fits = live is not None and not is_lazy(live) and _form(live) == new
                new = live if fits else _empty(new, live)
            value._buffers[name] = new
        value._non_persistent_buffers_set.clear()
        value._non_persistent_buffers_set.update(hidden)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the functions of the user's that torch calls beside a module's `forward`."""
    groups = (vars(module)[name] for name in sorted(_INTERNAL) if name.endswith("hooks"))
    return [hook for group in groups for hook in (group or {}).values() if is_users(hook)]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype and kind of device of a buffer whose values are saved elsewhere."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), dtype, tensor.device.type != "cpu"


def _empty(form: tuple[Any, ...], live: Tensor | None) -> Tensor:
    shape, dtype, on_device = form
    where = live.device if live is not None and on_device else "cpu"
    return torch.empty(shape, dtype=getattr(torch, dtype), device=where)


class _Optimizer(Kind):
    """An optimizer: its `state_dict()`, and the attributes that this leaves out."""

    def __init__(self, *, is_saved: bool) -> None:
        self._is_saved = is_saved

    def attributes(self, value: Any) -> dict[str, Any]:
        return {
            name: part
            for name, part in vars(value).items()
            if name not in ("state", "param_groups", "defaults")
            and not name.startswith("_optimizer_")  # hooks
            and not inspect.isroutine(part)  # a schedule replaces `step`
        }

    def read(self, value: Any) -> Any:
        return None if self._is_saved else value.state_dict()

    def write(self, value: Any, state: Any) -> None:
        if state is not None:
            value.load_state_dict(state)


class _Declared(Kind):
    """An object with `state_dict()` and `load_state_dict()`: its author is in charge."""

    def read(self, value: Any) -> Any:
        return value.state_dict()

    def write(self, value: Any, state: Any) -> None:
        value.load_state_dict(state)


class _Function(Kind):
    """A function of the user's: what it has closed over, its defaults and attributes."""

    def attributes(self, value: Any) -> dict[str, Any]:
        found = {}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                found[name] = cell.cell_contents
        return found

    def parts(self, value: Any) -> Iterator[Part]:
        yield from super().parts(value)
        for index, part in enumerate(value.__defaults__ or ()):
            yield f".defaults[{index}]", part
        yield from ((f".{name}", part) for name, part in (value.__kwdefaults__ or {}).items())
        yield from ((f".{name}", part) for name, part in vars(value).items())
        yield ".module", sys.modules.get(value.__module__)

    def read(self, value: Any) -> Any:
        return value.__defaults__, value.__kwdefaults__, vars(value)

    def write(self, value: Any, state: Any) -> None:
        value.__defaults__, value.__kwdefaults__, own = state
        vars(value).clear()
        vars(value).update(own)

    def put(self, value: Any, name: str, part: Any) -> None:
        value.__closure__[value.__code__.co_freevars.index(name)].cell_contents = part

    def remove(self, value: Any, name: str) -> None:
        del value.__closure__[value.__code__.co_freevars.index(name)].cell_contents


class _Class(Kind):
    """A class of the user's: its attributes that are neither methods nor descriptors."""

    def attributes(self, value: Any) -> dict[str, Any]:
        return {
            name: part
            for name, part in list(vars(value).items())
            if not name.startswith(("__", "_abc_"))
            and not hasattr(type(part), "__get__")
            and not isinstance(part, type)
        }

    def parts(self, value: Any) -> Iterator[Part]:
        yield from super().parts(value)
        for name, part in list(vars(value).items()):
            for method in (part, *(getattr(part, how, None) for how in ("__func__", "fget"))):
                if isinstance(method, types.FunctionType):
                    yield f".{name}", method
            if is_users(type(part)) and hasattr(type(part), "__get__"):
                yield f".{name}", part
        yield from ((".base", base) for base in value.__bases__)
        yield ".module", sys.modules.get(value.__module__)

    def put(self, value: Any, name: str, part: Any) -> None:
        setattr(value, name, part)

    def remove(self, value: Any, name: str) -> None:
        delattr(value, name)


class _Globals(Kind):
    """A module of the user's: its global variables."""

    def attributes(self, value: Any) -> dict[str, Any]:
        return {
            name: part
            for name, part in list(vars(value).items())
            if _is_own(name) and not isinstance(part, (types.ModuleType, type))
        }

    def parts(self, value: Any) -> Iterator[Part]:
        for name, part in list(vars(value).items()):
            if _is_own(name):
                yield f".{name}", part


def _is_own(name: str) -> bool:
    return not name.startswith("__") and name not in _GLOBALS_LEFT_OUT


class _Reduced(Kind):
    """Any other object: the state that pickle would save, given back as pickle would."""

    def parts(self, value: Any) -> Iterator[Part]:
        return _parts_of_reduced(value)

    def read(self, value: Any) -> Any:
        return reduced(value)[2]

    def arguments(self, value: Any) -> Any:
        _, arguments, _, *items = reduced(value)
        return arguments, [list(one) for one in items if one is not None]

    def write(self, value: Any, state: Any) -> None:
        if hasattr(type(value), "__setstate__"):
            value.__setstate__(state)
        elif state is not None:
            groups = state if isinstance(state, tuple) else (state,)
            for name, part in [pair for group in groups if group for pair in group.items()]:
                object.__setattr__(value, name, part)


def _parts_of_reduced(value: Any) -> Iterator[Part]:
    _, arguments, state, *_ = reduced(value)
    yield from ((f".arguments[{n}]", part) for n, part in enumerate(arguments))
    for group in state if isinstance(state, tuple) else (state,):
        if isinstance(group, dict):
            yield from ((f".{name}", part) for name, part in group.items())
        elif group is not None:
            yield ".state", group


def reduced(value: Any) -> Any:
    """Return what pickle would save of an object, of five parts."""
    found = value.__reduce_ex__(4)
    if isinstance(found, str):
        raise TypeError("it is known by its name")
    return (*found, *(None,) * (5 - len(found)))


def has_default_state(value: Any) -> bool:
    """Whether an object's state is its attributes: its class declares no other one."""
    kind: Any = type(value)
    return (
        kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__getstate__ is object.__getstate__
        and not hasattr(kind, "__setstate__")
        and not isinstance(value, (tuple, frozenset, int, str, bytes, float))
    )


def declares_state(value: Any) -> bool:
    """Whether an object's class says itself what is saved of it."""
    kind = type(value)
    for base in (nn.Module, torch.optim.Optimizer):
        if isinstance(value, base):
            names = ("state_dict", "load_state_dict", "get_extra_state", "set_extra_state")
            return any(getattr(kind, n, None) is not getattr(base, n, None) for n in names)
    if isinstance(value, (tuple, list, dict, set, bytearray, Tensor, numpy.ndarray, type)):
        return False
    return kind_of(value) is DECLARED or not has_default_state(value)


def _named(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            name = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            if hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return found


# Which kind an object is of

_CONTAINERS: tuple[tuple[type, Kind], ...] = (
    (dict, _Dict()),
    (list, _Container(list)),
    (deque, _Container(deque)),
    (set, _Container(set)),
    (bytearray, _BYTES := _Bytes()),
    (tuple, BY_VALUE := _ByValue()),
)
_FILE, ITERATOR, _MEMORY, _ARRAY, _MODULE = _File(), _Iterator(), _Memory(), _Array(), _Module()
SAVED_TENSOR, _TENSOR = _Tensor(is_saved=True), _Tensor(is_saved=False)
_VARIABLE, _VIEW = _Variable(), _View()
_FUNCTION, _CLASS, _GLOBALS, DECLARED = _Function(), _Class(), _Globals(), _Declared()
_ATTRIBUTES, _REDUCED = _Attributes(), _Reduced()
SAVED_OPTIMIZER, _OPTIMIZER = _Optimizer(is_saved=True), _Optimizer(is_saved=False)
OPAQUE = Kind()
"""Of an object that pickle refuses: what made it makes it again."""


def kind_of(value: Any) -> Kind | None:
    """Return the kind of an object; None for one that cannot change."""
    kind = type(value)
    if kind in ATOMS or isinstance(value, _CONSTANTS):
        return None
    if isinstance(value, Tensor):
        return _TENSOR
    if isinstance(value, enum.Enum):
        return _ATTRIBUTES if is_users(kind) else None
    if isinstance(value, (threading.local, SynchronizedBase)):
        return _ATTRIBUTES
    if kind in weakref.ProxyTypes or _package(kind) in _OF_A_PROCESS:
        return OPAQUE
    if kind is numpy.memmap:  # it belongs to a file
        return None
    if isinstance(value, mmap.mmap):
        return None if value.closed or memoryview(value).readonly else _BYTES
    if kind is contextvars.ContextVar:
        return _VARIABLE
    if kind in (types.MappingProxyType, memoryview):
        return _VIEW
    if kind in (numpy.ndarray, numpy.recarray) and not value.dtype.hasobject:
        return _ARRAY if value.flags.writeable else None
    if isinstance(value, nn.Module):
        return _MODULE
    if isinstance(value, torch.optim.Optimizer):
        return _OPTIMIZER
    if isinstance(value, type):
        if is_users(value):
            return _CLASS
        return None if is_found(value) else OPAQUE
    if isinstance(value, types.ModuleType):
        return _GLOBALS if is_users_module(value.__name__) else None
    if isinstance(value, types.FunctionType):
        return _FUNCTION if is_users(value) else (None if is_found(value) else OPAQUE)
    if isinstance(value, types.BuiltinFunctionType):
        bound = getattr(value, "__self__", None)
        return None if bound is None or isinstance(bound, (types.ModuleType, type)) else BY_VALUE
    if isinstance(value, frozenset):
        return None
    for builtin, its in _CONTAINERS:
        if isinstance(value, builtin):
            return its
    # look at the type: an object's __getattr__ may accept any name
    method = getattr(kind, "state_dict", None)
    if callable(method) and callable(getattr(kind, "load_state_dict", None)):
        return by_attributes(value) if getattr(method, "saves_attributes", False) else DECLARED
    if isinstance(value, io.IOBase):
        return _FILE
    try:
        _, arguments, state, *_ = reduced(value)
        made_of_parts = any(type(one) not in ATOMS and kind_of(one) for one in arguments)
    except Exception:  # pickle refuses it, or its class does; a user's method may raise anything
        return ITERATOR if hasattr(kind, "__next__") else OPAQUE
    if isinstance(value, (ctypes.Array, ctypes.Structure, ctypes._SimpleCData)):
        return _MEMORY
    if has_default_state(value):
        return _ATTRIBUTES
    return BY_VALUE if state is None or made_of_parts else _REDUCED


def by_attributes(value: Any) -> Kind:
    """Return the kind of an object whose attributes count, unless its class says otherwise."""
    return _ATTRIBUTES if has_default_state(value) else _REDUCED


def may_hold_state(value: Any) -> bool:
    """Whether an object that pickle refuses may have a state of the run's.

    Functions, locks, references, annotations and constants have none, and a class of the user's
    that refuses pickle says so itself.
    """
    kind: Any = type(value)
    if kind in weakref.ProxyTypes or _package(kind) in _WITHOUT_STATE:
        return False
    if isinstance(value, torch.qscheme):
        return False
    says_so = is_users(kind) and kind.__reduce_ex__ is not object.__reduce_ex__
    return not isinstance(value, (types.FunctionType, type, SemLock)) and not says_so


def named(value: Any) -> str | None:
    """Return the name of a class, function or module, after an `@`; None for other objects."""
    if isinstance(value, types.ModuleType):
        return f"@{value.__name__}"
    if isinstance(value, (type, types.FunctionType)) and is_found(value):
        return f"@{value.__module__}.{value.__qualname__}"
    return None


def is_users(value: Any) -> bool:
    """Whether a class or function is the user's code, and not of an installed package."""
    return is_users_module(getattr(value, "__module__", None) or "")


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_slot(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), types.MemberDescriptorType)


def is_found(value: Any) -> bool:
    """Whether pickle finds a class or function by its name."""
    found: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor itself requires a gradient, and not only what it was computed from."""
    return tensor.requires_grad and tensor.is_leaf


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


# Comparing


def plain_digest(value: Any) -> int | None:
    """Return a digest of a flat container of plain values, fast in C; None for any other value."""
    if type(value) not in (list, dict, set):
        return None
    parts = chain(value.keys(), value.values()) if isinstance(value, dict) else value
    if not _ATOMS.issuperset(map(type, parts)):
        return None
    # version 2: later versions depend on how often an object is referenced
    return zlib.crc32(marshal.dumps(value, 2))


_once: dict[int, tuple[object, object]] | None = None


@contextlib.contextmanager
def signatures_once() -> Iterator[None]:
    """Compute each signature of a tensor or array once within the context, which changes none."""
    global _once
    before, _once = _once, {} if _once is None else _once
    try:
        yield
    finally:
        _once = before


def computed_once(compute: Callable[[Any], object], value: Any) -> object:
    """Return the signature of an object that a run keeps; within `signatures_once`, do so once."""
    if _once is None:
        return compute(value)
    if id(value) not in _once:
        _once[id(value)] = compute(value), value  # kept, as is its id
    return _once[id(value)][0]


def tensor_signature(tensor: Tensor) -> object:
    """Return what changes with a tensor's values; torch does not count writes through `.data`.

    Reads each byte once, at 3 GB/s on the host. Device synchronisation for a tensor on a device.
    """
    if is_lazy(tensor):
        return "lazy"
    found = tensor.detach()
    form = (tuple(found.shape), str(found.dtype))
    if found.device.type == "meta":
        return form
    if found.layout is not torch.strided or found.is_quantized:
        file = io.BytesIO()
        torch.save(found, file)
        return *form, zlib.crc32(file.getvalue())
    found = found.resolve_conj().resolve_neg().to("cpu").contiguous()
    # not `.numpy()`: it marks the storage of the user's tensor as not resizable
    length = found.numel() * found.element_size()
    return *form, zlib.crc32(
        (ctypes.c_char * length).from_address(found.data_ptr()) if length else b""
    )


def array_signature(array: numpy.ndarray[Any, Any]) -> object:
    """Return what changes with an array's values."""
    whole = numpy.ascontiguousarray(array).reshape(-1)
    content = whole.view(numpy.uint8).data if array.nbytes else b""
    return array.shape, str(array.dtype), zlib.crc32(content)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of torch's own classes, with values."""
    return type(tensor) in (Tensor, nn.Parameter)


def memory_of(value: Any) -> tuple[str, int] | None:
    """Return what tensors and arrays that share memory have in common; None: they share none."""
    if isinstance(value, numpy.ndarray):
        if not value.nbytes or value.dtype.hasobject or not value.flags.writeable:
            return None
        while isinstance(value.base, numpy.ndarray):
            value = value.base
        return "cpu", value.ctypes.data
    if not is_plain(value) or value.layout is not torch.strided or value.device.type == "meta":
        return None
    address = value.untyped_storage().data_ptr()
    return (str(value.device), address) if address else None


def has_overlap(tensor: Tensor) -> bool:
    """Whether several elements share memory, as in an expanded tensor."""
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
