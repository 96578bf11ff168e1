"""ObjectState: what the code of a run can reach and torch's `state_dict()`s leave out.

Everything below a run's task, data, model and optimizer, and the globals of the user's modules, is
compared at each save with what it was when the run was built. What has changed is pickled
together, so that what several objects share stays shared; tensors stay out of the pickle. A
resumed run builds everything anew, and restores in place what had changed. What pickle refuses (a
handle, a connection, a lambda) is what the code that built it makes again; if it has changed
since, the run is refused. What must not live here: how an object of a kind is read and restored
(`object_kinds.py`), and what else a checkpoint has (`train_state.py`).
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import copyreg
import io
import os
import pickle
import pickletools
import sys
import tempfile
import types
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from trainable.errors import CheckpointError, TaskError
from trainable.object_kinds import (
    ATOMS,
    BY_VALUE,
    DECLARED,
    ITERATOR,
    OPAQUE,
    SAVED_OPTIMIZER,
    SAVED_TENSOR,
    Kind,
    array_signature,
    attributes_of,
    by_attributes,
    computed_once,
    declares_state,
    has_overlap,
    hooks_of,
    is_found,
    is_trained,
    is_users,
    kind_of,
    may_hold_state,
    memory_of,
    named,
    plain_digest,
    tensor_signature,
)
from trainable.sample_kinds import is_stream
from trainable.store.snapshot import snapshot

_LOST = "a resumed run builds it again and would lose the change"
_REMEDY = (
    "make in the constructor what does not change, and keep what changes as numbers, tensors, "
    "arrays, collections, generators and objects that pickle takes; or override state_dict() and "
    "load_state_dict(), of its class or of the task, to save what matters of it"
)

TASK = "task"
"""The name of the task among the roots."""


class _Node(NamedTuple):
    """An object that a run reaches, by the first path to it."""

    path: str
    value: Any
    kind: Kind


class _Signature(NamedTuple):
    """What changes when a part of an object's state changes."""

    digest: object
    has_tensors: bool = False
    """Whether it has tensors of floating-point numbers that are saved with it."""
    is_refused: bool = False
    """Whether it has something that pickle refuses, of which only the identity counts."""


class _Unknown:
    """The signature of what cannot be read: it may have changed."""

    __hash__ = None  # type: ignore[assignment]
    has_tensors = is_refused = False
    digest = ((),)

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return "unknown"


_Signatures = dict[str, Any]
"""A signature of each attribute by its name, and one of the further state by the name ""."""


class _Content(NamedTuple):
    """What is saved of an object."""

    parts: dict[str, Any]
    """Parts of its state by name."""
    gone: Collection[str] | None
    """Names of attributes that are gone; None: it has all that there is."""
    with_tensors: Collection[str] = ()
    """Names of the parts with tensors of floating-point numbers."""


class ObjectState:
    """What has changed below some objects since they were built."""

    _lost, _what, _remedy = _LOST, "has changed, and cannot be saved", _REMEDY

    def __init__(
        self,
        roots: Mapping[str, object],
        *,
        stored: Iterable[object] = (),
        left_out: Mapping[str, object] | None = None,
        device: torch.device | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._roots, self._names = dict(roots), dict(names or {})
        # these keep the objects, so that no id is used again
        self._stored = {id(one): one for one in stored}
        self._left_out = dict(left_out or {})
        self._held: dict[int, object] = {}
        self.device = device or torch.device("cpu")
        """Where tensors go that were on a device."""
        self._late: dict[str, object] = {}
        self._look()

    def _look(self) -> None:
        seen = {id(one) for one in self._left_out.values()}
        self._nodes = _reach(self._roots, seen, self._stored, self._held)
        # what is saved elsewhere is known by its path, and not compared or saved here
        inside = {
            f"{path}.{name}": part
            for path, one in self._left_out.items()
            for name, part in getattr(one, "__dict__", {}).items()
        }
        found = _reach(inside, seen, self._stored, self._held)
        self._others = self._left_out | {path: node.value for path, node in found.items()}
        self._table = {id(one): path for path, one in self._others.items()}
        self._table |= {id(node.value): path for path, node in self._nodes.items()}
        self._forms = self._all_forms()
        self._built = self._signatures()

    def made_again(self) -> list[str]:
        """Return what pickle refuses, with its class: the code that built it makes it again.

        Without the globals of modules, among which are those that pickle finds by their names.
        """
        return [
            f"{self._text(path)} ({type(node.value).__qualname__})"
            for path, node in self._nodes.items()
            if node.kind is OPAQUE and not path.startswith("@") and may_hold_state(node.value)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed since the build: pickled bytes and their tensors, or nothing."""
        self._check_forms()
        return self._taken(self._changes())

    def load_state_dict(self, state: Mapping[str, Any], *, trusted: bool = True) -> None:
        """Restore in place what `state_dict` returned."""
        self._write(state, None, trusted=trusted)

    def from_now(self, *, lost: str) -> ObjectState:
        """Return one that finds what has changed since this call, and not since the build."""
        other = copy.copy(self)
        other._lost, other._late = lost, dict(self._late)
        other._built = other._signatures()
        return other

    @contextlib.contextmanager
    def kept(self, *, lost: str) -> Iterator[None]:
        """Restore on exit what changes within. Costs a copy of all values but those of data."""
        before = self.from_now(lost=lost)
        content: dict[str, _Content] = {}
        for path, node in before._nodes.items():
            if path.startswith("data") or node.kind in (OPAQUE, ITERATOR):
                continue
            with contextlib.suppress(Exception):  # refused below if it changes
                whole = _Content(node.kind.content(node.value), None)
                before._pickled({path: whole})
                content[path] = whole
        present = snapshot({"kept": before._pickled(content) if content else {}})["kept"]
        yield
        before._check_forms()
        changes = before._changes()
        before._taken(changes)  # refuses what cannot be restored
        self._write(present, changes)

    # Comparing ranks

    def digest(self) -> str:
        """Return a digest of all values as they were built."""
        return f"{zlib.crc32(repr(sorted(self._built.items())).encode()):08x}"

    def declared(self) -> list[str]:
        """Return the objects whose class, or optimizers that, say themselves what is saved."""
        paths = {id(node.value): f"{self._text(node.path)}, " for node in self._nodes.values()}
        return [
            f"{paths.get(id(one), '')}an object of type {type(one).__qualname__}"
            for one in (*(node.value for node in self._nodes.values()), *self._held.values())
            if (is_users(type(one)) or isinstance(one, torch.optim.Optimizer))
            and declares_state(one)
        ]

    def compared(self) -> dict[str, list[str]]:
        """Return two digests of each value: of all of it, and without what is a process's own.

        Without the globals of modules, which may say which rank a process is.
        """
        found: dict[str, list[str]] = {}
        for path, node in self._nodes.items():
            if not path.startswith("@"):
                name, its = _with_type(node), self._signature(node)
                own = self._signature(node, told=True)
                found |= {
                    f"{name} {key}": [repr(one), repr(own.get(key))] for key, one in its.items()
                }
        return found

    def chosen(
        self, names: Collection[str], common: Collection[str], *, lost: str, remedy: str
    ) -> dict[str, Any]:
        """Return the values at some paths, as `compared` names them, for another rank."""
        other = copy.copy(self)
        other._what, other._lost, other._remedy = "is another one on another rank", lost, remedy
        there = {path: _with_type(node) for path, node in self._nodes.items()}
        other._table = {
            key: path
            for key, path in self._table.items()
            if f"{there[path]} " in common or f"{there[path]} " not in names
        }
        parts: dict[str, set[str]] = {}
        for name in names:
            path, kind, attribute = name.split(" ")
            parts.setdefault(f"{path} {kind}", set()).add(attribute)
        content: dict[str, _Content] = {}
        for path, name in there.items():
            if name in parts and f"{name} " in common:
                node = self._nodes[path]
                if node.kind in (OPAQUE, ITERATOR):
                    other._refuse(path, node.value, other._what)
                there_now = node.kind.content(node.value)
                sent = {key: part for key, part in there_now.items() if key in parts[name]}
                gone = [key for key in parts[name] if key not in there_now]
                content[path] = _Content(sent, gone)
        return other._taken(content)

    def take(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Restore the values of the first rank, which sends nothing to itself.

        What ranks built differently is built differently at a resume, too. So it is always saved.
        """
        self.load_state_dict(state)
        self._look()
        for path, node in self._nodes.items():
            for key in self._built[path]:
                if f"{_with_type(node)} {key}" in names:
                    self._built[path][key] = _Unknown()

    # Comparing values

    def _signatures(self) -> dict[str, _Signatures]:
        return {path: self._signature(node) for path, node in self._nodes.items()}

    def _signature(self, node: _Node, *, told: bool = False) -> _Signatures:
        """Return what changes when the value changes."""
        value = node.value
        if node.kind is OPAQUE:
            return {"": _Signature(type(value).__qualname__)}
        if isinstance(value, Tensor):
            shape = None if is_lazy(value) else tuple(value.shape)
            is_saved = node.kind is SAVED_TENSOR
            values = None if is_saved else computed_once(tensor_signature, value)
            digest = (shape, str(value.dtype), is_trained(value)), values
            own = _Signature(digest, not is_saved and value.is_floating_point())
            its = node.kind.attributes(value)
            return {name: self._sign(part, told) for name, part in its.items()} | {"": own}
        if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            return {"": _Signature(computed_once(array_signature, value))}
        if isinstance(value, (list, dict, set)) and not told:
            flat = plain_digest(value)
            if flat is not None and not getattr(value, "__dict__", None):
                return {"": _Signature(flat)}
        try:
            content = node.kind.content(value)
        except Exception:  # objects of the user may raise anything
            return {"": _Unknown()}
        return {name: self._sign(part, told) for name, part in content.items()}

    def _sign(self, value: Any, told: bool) -> _Signature | _Unknown:
        if type(value) in ATOMS and not told:
            return _Signature(repr(value))
        file = io.BytesIO()
        signing = _Signing(file, self._table, self._held, told=told)
        try:
            signing.dump(value)
        except Exception:  # as above
            return _Unknown()
        return _Signature(zlib.crc32(file.getbuffer()), signing.has_tensors, signing.is_refused)

    def _all_forms(self) -> dict[str, dict[str, tuple[object, str]]]:
        """Return of each object what no newly built one can be given, and a text for its change.

        Its class, the arguments that it is made of, the members of a module, and for a tensor
        which others share its memory.
        """
        sharing: dict[object, list[str]] = {}
        for path, node in self._nodes.items():
            if node.kind is not OPAQUE and isinstance(node.value, Tensor):
                sharing.setdefault(memory_of(node.value), []).append(path)
        sharing.pop(None, None)
        return {
            path: self._form(node, sharing)
            for path, node in self._nodes.items()
            if node.kind is not OPAQUE
        }

    def _form(
        self, node: _Node, sharing: Mapping[object, list[str]]
    ) -> dict[str, tuple[object, str]]:
        value = node.value
        if isinstance(value, Tensor):
            if node.kind is SAVED_TENSOR:
                return {}
            others = sharing.get(memory_of(value), [])
            return {"": (len(others) > 1 and others, "shares memory with others than before")}
        if isinstance(value, LazyModuleMixin):
            return {}  # it changes as its shapes become known
        file, made_of = io.BytesIO(), None
        with contextlib.suppress(Exception):  # as above
            if (arguments := node.kind.arguments(value)) is not None:
                _Signing(file, self._table, self._held).dump(arguments)
                made_of = zlib.crc32(file.getbuffer())
        what = "is made of other arguments than before; assign a new one instead"
        form: dict[str, tuple[object, str]] = {"": (made_of, what)}
        if isinstance(value, nn.Module):
            form |= _members(value)
        return form | {"class": (type(value), "is of another class than when it was built")}

    def _check_forms(self) -> None:
        """Refuse what no newly built object can be given."""
        forms = self._all_forms()
        for path, before in self._forms.items():
            value = self._nodes[path].value
            if not before:
                continue
            now = forms[path]
            for name in sorted(before.keys() | now.keys(), key=before.__contains__):
                there, what = now.get(name) or before[name]
                if name not in now or name not in before or before[name][0] != there:
                    how = "replaced" if name in before else "registered"
                    how = how if name in now else "removed"
                    what = what if name in ("", "class") else f"{what} {how} after it was built"
                    is_whole = name in ("", "class")
                    self._refuse(
                        path if is_whole else f"{path}.{name}", value if is_whole else None, what
                    )

    # Saving

    def _changes(self) -> dict[str, _Content]:
        """Return what has changed of each object, and the names of attributes that are gone.

        What has not changed stays as the resumed run builds it, which may have other options.
        """
        found: dict[str, _Content] = {}
        for path, before in self._built.items():
            node = self._nodes[path]
            now = self._signature(node)
            if now == before:
                continue
            if node.kind is ITERATOR:
                self._refuse(path, node.value, "has moved on since it was built")
            if node.kind is OPAQUE:
                self._refuse(path, node.value, "is of another class than when it was built")
            try:
                content = node.kind.content(node.value)
            except Exception as problem:  # objects of the user may raise anything
                self._refuse(path, node.value, f"cannot be saved ({problem!r})")
            changed = {
                name: part
                for name, part in content.items()
                if name not in before or before[name] != now.get(name)
            }
            for name in [*changed]:
                if now.get(name, _Unknown()).is_refused and self._is_made_late(
                    f"{path}.{name}", before.get(name), changed[name]
                ):
                    del changed[name]
            gone = [name for name in before if name not in content]
            if changed or gone:
                found[path] = _Content(
                    changed,
                    gone,
                    [name for name in changed if now.get(name, _Unknown()).has_tensors],
                )
        return found

    def _is_made_late(self, path: str, before: Any, part: object) -> bool:
        """Whether an attribute is what the code makes at its first use, as it opens a handle.

        It was None, or not there, when the run was built, and is the same one at each save.
        """
        if before not in (None, _Signature("None")):
            return False
        is_position = hasattr(type(part), "__next__") or isinstance(part, io.IOBase)
        is_code = isinstance(part, (types.FunctionType, types.MethodType))
        return not is_position and not is_code and self._late.setdefault(path, part) is part

    def _taken(self, content: dict[str, _Content]) -> dict[str, Any]:
        """Return parts of some objects, pickled together."""
        if not content:
            return {}
        try:
            return self._pickled(content)
        except Exception as problem:  # objects of the user may raise anything
            first: dict[str, _Content] = {}
            for path, its in content.items():
                first[path] = its
                try:
                    self._pickled(first)
                except Exception as found:  # as above
                    self._refuse_part(self._nodes[path], found)
            raise AssertionError("all parts can be saved, and the whole cannot") from problem

    def _pickled(self, content: dict[str, _Content]) -> dict[str, Any]:
        saving = _Saving(self._table, self._memory)
        named = {}
        for path, its in content.items():
            value = self._nodes[path].value
            named[path] = type(value).__qualname__, its.parts, its.gone
            if isinstance(value, Tensor) and isinstance(its.parts.get("", (None,))[0], Tensor):
                saving.own.add(id(its.parts[""][0]))
        saved = saving.saved(named)
        names: set[str] = set()
        for path, its in content.items():
            root, _, below = path.partition(".")
            if path == TASK:
                names.update(its.with_tensors)
            elif root == TASK and its.with_tensors:
                names.add(below.partition(".")[0].partition("[")[0])
        return saved | {"names": sorted(names)}

    def _memory(self) -> dict[object, tuple[str, object]]:
        """Return path and value of one of those that share each memory; no path: it may move."""
        found: dict[object, tuple[str, object]] = {}
        for one in self._stored.values():
            if isinstance(one, Tensor):
                found[memory_of(one)] = "", one
        for value in self._others.values():
            if isinstance(value, (Tensor, numpy.ndarray)):
                found[memory_of(value)] = "", value
        for path, node in self._nodes.items():
            value = node.value
            if node.kind is OPAQUE or not isinstance(value, (Tensor, numpy.ndarray)):
                continue
            stays = False
            if isinstance(value, Tensor) and not has_overlap(value):
                before = self._built[path][""].digest[0]
                stays = before[:2] == (tuple(value.shape), str(value.dtype))
            found[memory_of(value)] = path if stays else "", value
        return found

    def _refuse_part(self, node: _Node, problem: Exception) -> NoReturn:
        """Refuse the part of an object that pickle refuses."""
        with contextlib.suppress(Exception):  # of `read`
            for step, part in node.kind.parts(node.value):
                try:
                    _Saving(self._table, self._memory).saved(part)
                except Exception as found:  # as above
                    node, problem = _Node(node.path + step, part, OPAQUE), found
                    break
        self._refuse(node.path, node.value, f"{self._what} ({problem})")

    def _refuse(self, path: str, value: object, what: str) -> NoReturn:
        shown = "" if value is None else f" (an object of type {type(value).__qualname__})"
        raise TaskError(f"{self._text(path)}{shown} {what}; {self._lost}; {self._remedy}")

    def _text(self, path: str) -> str:
        for root, name in self._names.items():
            if path == root or path.startswith((f"{root}.", f"{root}[")):
                return name + path[len(root) :]
        return path.removeprefix("@")

    # Restoring

    def _write(
        self, state: Mapping[str, Any], paths: Collection[str] | None, *, trusted: bool = True
    ) -> None:
        if not state:
            return
        where = "state of its objects"
        try:
            found = _Unpickler(state, self, trusted=trusted).load()
            # Sets and dicts last: they need the hashes of their members.
            for path, content in sorted(found.items(), key=self._order):
                if paths is None or path in paths:
                    where = self._text(path)
                    node = self._nodes[path]
                    kind, parts, gone = content
                    is_other = kind != type(node.value).__qualname__
                    if is_other and not isinstance(node.value, (LazyModuleMixin, Tensor)):
                        raise TypeError(f"it is a {type(node.value).__qualname__}, not a {kind}")
                    if gone is None:  # it has all that is there
                        gone = node.kind.attributes(node.value).keys() - parts.keys()
                    for name in gone:
                        node.kind.remove(node.value, name)
                    for name, part in parts.items():
                        if name:
                            node.kind.put(node.value, name, part)
                    if "" in parts:
                        node.kind.write(node.value, parts[""])
        # as above
        except Exception as problem:
            raise CheckpointError(
                f"the checkpoint's {where} does not fit what is there now "
                f"({type(problem).__name__}: {problem}); continue with the code, the version "
                "and the configuration that wrote it, or start a new run"
            ) from problem

    def _order(self, item: tuple[str, Any]) -> int:
        """Return when an object is written: after those whose values or hashes it may read."""
        node = self._nodes.get(item[0])
        if node is None or isinstance(node.value, (Tensor, numpy.ndarray)):
            return 0
        if isinstance(node.value, (set, dict)):
            return 3
        return 2 if node.kind is DECLARED else 1

    def at(self, path: str) -> object:
        """Return the object at a path."""
        if path in self._nodes:
            return self._nodes[path].value
        if path not in self._others:
            raise LookupError(f"there is no {self._text(path)}")
        return self._others[path]


def _reach(
    roots: Mapping[str, object],
    seen: set[int],
    stored: Collection[int] = (),
    held: dict[int, object] | None = None,
) -> dict[str, _Node]:
    """Return all objects below some roots that may change, by the first path to each."""
    found: dict[str, _Node] = {}
    # not recursive: models may be nested deeper than Python's stack
    waiting: deque[tuple[str, Any]] = deque(roots.items())
    while waiting:
        path, value = waiting.popleft()
        if type(value) in ATOMS or id(value) in seen:
            continue
        try:
            kind = by_attributes(value) if path == TASK else kind_of(value)
        except Exception:  # an object of the user's may raise anything
            kind = OPAQUE
        if kind is None:
            continue
        seen.add(id(value))
        path = (kind is not OPAQUE and named(value)) or path
        while path in found:  # as a closure's variable and a function's attribute of one name
            path += "'"
        if id(value) in stored:
            kind = SAVED_TENSOR if isinstance(value, Tensor) else SAVED_OPTIMIZER
        if kind is not BY_VALUE:
            found[path] = _Node(path, value, kind)
        elif held is not None:
            held[id(value)] = value
        if is_users(type(value)):
            waiting.append((f"{path}.class", type(value)))
        if plain_digest(value) is not None:
            continue
        try:
            waiting.extend((path + step, part) for step, part in list(kind.parts(value)))
        except Exception:  # as above
            found[path] = _Node(path, value, OPAQUE)
    return found


def dumps(value: object, what: str) -> dict[str, Any]:
    """Return a value as `state_dict` returns objects: a pickle as bytes, and its tensors."""
    try:
        return _Saving({}, dict).saved(value) | {"names": []}
    except Exception as problem:  # an object of the user's may raise anything
        raise TaskError(
            f"{what} cannot be saved ({problem}); a state holds what pickle takes: tensors, "
            "arrays, numbers, strings and collections of them"
        ) from problem


def loads(state: Mapping[str, Any]) -> Any:
    """Return the value of which `dumps` made a state."""
    return _Unpickler(state, ObjectState({}), trusted=True).load()


class _Pickler(pickle.Pickler):
    """Writes objects; those that a run builds anew by their path."""

    def __init__(self, file: io.BytesIO, table: Mapping[int, str]) -> None:
        super().__init__(file, 5)
        self._table = table

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for an object in the pickle; None for all others."""
        if type(value) in ATOMS:
            return None
        if (path := self._table.get(id(value))) is not None:
            return "at", path
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        return self._of_tensor(value) if isinstance(value, Tensor) else None

    def _of_tensor(self, value: Tensor) -> Any:
        raise NotImplementedError

    def reducer_override(self, value: Any) -> Any:
        """Return what pickle saves of an object that is not of a class of its own."""
        if isinstance(value, types.MethodType):
            owner = value.__self__
            kind = owner if isinstance(owner, type) else type(owner)
            declared = getattr(kind, value.__name__, None)
            if getattr(declared, "__func__", declared) is not value.__func__:
                raise pickle.PicklingError(f"{value.__qualname__} is no method of its class")
        return NotImplemented


class _Signing(_Pickler):
    """Writes what changes when an object changes."""

    def __init__(
        self,
        file: io.BytesIO,
        table: Mapping[int, str],
        held: dict[int, object],
        *,
        told: bool = False,
    ) -> None:
        super().__init__(file, table)
        self._held, self._told = held, told
        self.has_tensors = self.is_refused = False

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for an object in the pickle; None for all others."""
        if self._told and type(value) is str and os.path.isabs(value):
            is_temporary = Path(value).is_relative_to(tempfile.gettempdir())
            return "path", "" if is_temporary else Path(value).name
        if self._told and isinstance(value, torch.device):
            return "device", value.type
        found = super().persistent_id(value)
        return (*found, type(value).__qualname__) if found and found[0] == "at" else found

    def _of_tensor(self, value: Tensor) -> Any:
        self.has_tensors |= value.is_floating_point()
        how = isinstance(value, nn.Parameter), is_trained(value), value.device.type != "cpu"
        return "signature", tensor_signature(value), how, attributes_of(value)

    def reducer_override(self, value: Any) -> Any:
        """Return what pickle saves of an object, and a stand-in for one that it refuses."""
        try:
            super().reducer_override(value)
            if isinstance(value, (types.FunctionType, type)):
                if is_found(value):
                    return NotImplemented
            elif type(value) in copyreg.dispatch_table:
                return NotImplemented
            else:
                return value.__reduce_ex__(5)
        except Exception:  # an object of the user's may raise anything
            pass
        self.is_refused = True
        self._held[id(value)] = value
        return tuple, ([type(value).__qualname__, None if self._told else id(value)],)


class _Saving(_Pickler):
    """Writes objects to be restored, with tensors beside the pickle.

    Tensors that share memory share it when they are restored; arrays that do are refused.
    """

    def __init__(
        self,
        table: Mapping[int, str],
        memory: Callable[[], dict[object, tuple[str, object]]],
    ) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, table)
        self._read_memory = memory
        self._built: dict[object, tuple[str, object]] | None = None
        self._new: dict[object, tuple[int, object]] = {}
        self._numbers: dict[int, tuple[Any, object]] = {}
        self._tensors: list[Tensor] = []
        self._shared: set[int] = set()
        self.own: set[int] = set()
        """The ids of tensors with the values of built ones, which share their memory."""

    def saved(self, value: object) -> dict[str, Any]:
        """Return a value's pickle, its tensors, and the numbers of those of whole memories."""
        self.dump(value)
        tensors, shared = self._tensors, sorted(self._shared)
        return {"pickle": self._file.getvalue(), "tensors": tensors, "shared": shared}

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for an object in the pickle; None for all others."""
        found = super().persistent_id(value)
        if found is None and type(value) in (numpy.ndarray, numpy.recarray):
            memory = memory_of(value)
            if memory is not None:
                _, first = self._base(memory) or self._new.setdefault(memory, (0, value))
                if first is not value:
                    self._refuse_shared(value)
        return found

    def _base(self, memory: object) -> tuple[str, object] | None:
        if memory is None:
            return None
        if self._built is None:
            self._built = self._read_memory()
        return self._built.get(memory)

    def _refuse_shared(self, value: object) -> NoReturn:
        raise pickle.PicklingError(
            f"a {type(value).__name__} is a view of another value, and a resumed run would have a "
            "copy; keep a copy of it by .copy() or .clone(), or make the view where it is used"
        )

    def _of_tensor(self, value: Tensor) -> Any:
        if id(value) not in self._numbers:
            how = isinstance(value, nn.Parameter), is_trained(value), value.device.type != "cpu"
            source, form = self._source(value), None
            if memory_of(value) is not None:
                form = tuple(value.shape), value.stride(), value.storage_offset()
            written = "tensor", len(self._numbers), source, form, how, attributes_of(value)
            self._numbers[id(value)] = written, value  # kept, as is its id
        return self._numbers[id(value)][0]

    def _source(self, value: Tensor) -> int | str:
        """Return the path of a built tensor with a tensor's memory, or the number of a new one."""
        memory = None if id(value) in self.own else memory_of(value)
        if (base := self._base(memory)) is not None:
            path, other = base
            if not path or not isinstance(other, Tensor) or other.dtype != value.dtype:
                self._refuse_shared(value)
            return path
        if memory in self._new:
            number, other = self._new[memory]
            size = value.untyped_storage().nbytes()
            if (
                not isinstance(other, Tensor)
                or other.dtype != value.dtype
                or size % value.itemsize
            ):
                self._refuse_shared(value)
            if number not in self._shared:
                self._shared.add(number)
                self._tensors[number] = value.detach().as_strided(
                    (size // value.itemsize,), (1,), 0
                )
            return number
        if memory is not None:
            self._new[memory] = len(self._tensors), value
        self._tensors.append(value.detach())
        return len(self._tensors) - 1


def _laid_out(
    value: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> Tensor:
    """Return a tensor in memory as it lay: a kernel may add in the order of the memory."""
    if 0 in stride or (value.stride(), value.storage_offset()) == (stride, offset):
        return value
    size = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return value.new_empty(size).as_strided(shape, stride, offset).copy_(value)


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written, and takes what a run has built from it."""

    def __init__(self, state: Mapping[str, Any], objects: ObjectState, *, trusted: bool) -> None:
        super().__init__(io.BytesIO(state["pickle"]))
        self._saved, self._objects, self._trusted = state, objects, trusted
        self._tensors: dict[int, Tensor] = {}
        self._memories: dict[int, Tensor] = {}

    def persistent_load(self, written: Any) -> Any:
        """Return the object for which something stands in the pickle."""
        kind, name, *rest = written
        if kind == "at":
            return self._objects.at(name)
        if kind == "module" and self._trusted:
            return sys.modules[name]
        if kind == "tensor":
            if name not in self._tensors:
                self._tensors[name] = self._tensor(*rest)
            return self._tensors[name]
        raise pickle.UnpicklingError(f"{kind} cannot be read")

    def _tensor(
        self, source: int | str, form: Any, how: tuple[bool, ...], attributes: dict[str, Any]
    ) -> Tensor:
        is_parameter, trains, on_device = how
        value: Any
        if isinstance(source, str):
            value = self._objects.at(source)
        elif source not in self._memories:
            where = self._objects.device if on_device else torch.device("cpu")
            value = self._saved["tensors"][source].detach().to(where, copy=True)
            self._memories[source] = value
        else:
            value = self._memories[source]
        value = value.detach()
        if isinstance(source, str) or source in self._saved.get("shared", ()):
            value = value.as_strided(*form)
        elif form is not None and value.numel() and not has_overlap(value):
            value = _laid_out(value, *form)
        made: Tensor = (
            nn.Parameter(value, trains) if is_parameter else value.requires_grad_(trains)
        )
        made.grad = attributes.pop("grad", None)
        vars(made).update(attributes)
        return made

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of a module that this run has imported.

        That is enough to run any code: `checkpoint.check_owner` says whose pickles are read.
        """
        unsafe = module == "builtins" and not isinstance(getattr(builtins, name, None), type)
        unsafe = unsafe and name not in ("getattr", "iter", "reversed")
        if module not in sys.modules or unsafe:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)

    def load(self) -> Any:
        """Return what was saved."""
        if not self._trusted:
            for operation, _, _ in pickletools.genops(self._saved["pickle"]):
                if operation.name in _CALLS:
                    raise pickle.UnpicklingError("it has objects of classes")
        return super().load()


_CALLS = frozenset(
    "GLOBAL STACK_GLOBAL INST OBJ NEWOBJ NEWOBJ_EX REDUCE BUILD EXT1 EXT2 EXT4".split()  # noqa: SIM905
)
"""The operations of a pickle that name or call something."""


def _with_type(node: _Node) -> str:
    """Return path and class of an object, without blanks in them."""
    return f"{node.path.replace(' ', '_')} {type(node.value).__qualname__}"


def _members(module: nn.Module) -> dict[str, tuple[object, str]]:
    hooks = {f"hooks[{n}]": hook for n, hook in enumerate(hooks_of(module))}
    forward = {"forward": vars(module)["forward"]} if "forward" in vars(module) else {}
    groups: dict[str, Mapping[str, object]] = {
        "parameter": module._parameters,
        "module": module._modules,
        "hook": hooks,
        "function": forward,
    }
    return {
        name: (id(one), f"is a {what} that was")
        for what, group in groups.items()
        for name, one in group.items()
        if one is not None
    }


def move_modules(task: object, data: object, device: torch.device) -> None:
    """Move the modules below a task, such as an average of the model, to a device.

    Those of a data set stay, and those of the user's Python modules.
    """
    found = _reach({TASK: task}, {id(one) for one in parts_left_out(data).values()})
    of_data = tuple(f"{path}." for path, node in found.items() if isinstance(node.value, Dataset))
    for path, node in found.items():
        module = node.value
        if not isinstance(module, nn.Module) or not path.startswith(f"{TASK}."):
            continue
        if path.startswith(of_data) or node.kind is OPAQUE:
            continue
        if all(one.device.type == "cpu" for one in (*module.parameters(), *module.buffers())):
            module.to(device)


def parts_left_out(data: object) -> dict[str, object]:
    """Return the streams of a `Data` by name, whose positions are saved elsewhere."""
    splits = {f"data.{name}": getattr(data, name, None) for name in ("train", "val", "test")}
    return {name: one for name, one in splits.items() if one is not None and is_stream(one)}


def run_objects(
    task: object,
    model: nn.Module,
    *,
    trained: Iterable[object] = (),
    data: object = None,
    optimizers: Iterable[object] = (),
    whole_task: bool = True,
) -> ObjectState:
    """Return what a run's code can reach, right after the run was built."""
    optimizers = list(optimizers)
    roots: dict[str, object] = {
        f"data.{name}": part
        for name in ("train", "val", "collate", "collate_val", "sampler", "batch_sampler")
        if (part := getattr(data, name, None)) is not None
    }
    roots["model"] = model
    roots |= {f"optimizer{n or ''}": one for n, one in enumerate(optimizers)}
    if task is not None:
        roots[TASK if whole_task else "class"] = task if whole_task else type(task)
    persistent = [
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    return ObjectState(
        roots,
        stored=[*model.parameters(), *persistent, *trained, *optimizers],
        left_out=parts_left_out(data) | ({} if whole_task or task is None else {TASK: task}),
        device=next((p.device for p in model.parameters()), None),
        names={TASK: type(task).__name__},
    )
