"""ObjectState: what the code of a run can reach and torch's `state_dict()`s leave out.

Everything below a run's task, data, model and optimizer, and the globals of the user's modules, is
compared at each save with what it was when the run was built. What has changed is pickled
together, so that what several objects share stays shared; tensors stay out of the pickle. A
resumed run builds everything anew, and restores in place what had changed. What pickle refuses (a
handle, a connection, a lambda) is what the code that built it makes again; if it has changed
since, the run is refused. What must not live here: how an object of a kind is read and restored
(`reachable.py`), and what else a checkpoint has (`train_state.py`).
"""

from __future__ import annotations

import builtins
import contextlib
import copy
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

from trainable.errors import CheckpointError, TaskError
from trainable.reachable import (
    ATOMS,
    ATTRIBUTES,
    BY_VALUE,
    ITERATOR,
    OPAQUE,
    SAVED_OPTIMIZER,
    Kind,
    array_signature,
    held_modules,
    hooks_of,
    is_trained,
    is_users,
    kind_of,
    named,
    plain_digest,
    tensor_signature,
)
from trainable.snapshot import snapshot
from trainable.splits import is_stream

_LOST = "a resumed run builds it again and would lose the change"
_REMEDY = (
    "keep what changes as numbers, tensors, arrays, collections, generators and objects that "
    "pickle takes; or override state_dict() and load_state_dict(), of its class or of the task, "
    "to save what matters of it"
)

TASK = "task"
"""The name of the task among the roots."""


class _Node(NamedTuple):
    """An object that a run reaches, by the first path to it."""

    path: str
    value: Any
    kind: Kind


class Signature(NamedTuple):
    """What changes when an object changes: of each attribute, and of its further state."""

    attributes: dict[str, object]
    rest: object


class ObjectState:
    """What has changed below some objects since they were built.

    Args:
        roots: The objects by name; a name begins the path to what is below it.
        stored: Tensors whose values, and optimizers whose states, are saved elsewhere.
        left_out: Objects that are not looked at.
        device: Where tensors go that were on a device.
        names: What messages call a root, if not by its name.
    """

    _lost, _what, _remedy = _LOST, "has changed, and cannot be saved", _REMEDY

    def __init__(
        self,
        roots: Mapping[str, object],
        *,
        stored: Iterable[object] = (),
        left_out: Iterable[object] = (),
        device: torch.device | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._roots, self._names = dict(roots), dict(names or {})
        # these keep the objects, so that no id is used again
        self._stored = {id(one): one for one in stored}
        self._left_out = {id(one): one for one in left_out}
        self._tuples: list[object] = []
        self._device = device or torch.device("cpu")
        self._late: dict[str, object] = {}
        self._look()

    def _look(self) -> None:
        self._nodes = self._reach()
        self._table = {id(node.value): path for path, node in self._nodes.items()}
        self._members = {
            path: _members(node.value)
            for path, node in self._nodes.items()
            if node.kind is not OPAQUE and isinstance(node.value, nn.Module)
        }
        self._types = {path: type(node.value) for path, node in self._nodes.items()}
        self._arguments = {path: self._made_of(node) for path, node in self._nodes.items()}
        self._built = self._signatures()

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed since the build: a pickle as bytes, and its tensors.

        Empty if nothing has.

        Raises:
            TaskError: A value that has changed cannot be restored.
        """
        for node in self._nodes.values():
            self._check_form(node)
        return self._taken(self._changed())

    def load_state_dict(self, state: Mapping[str, Any], *, trusted: bool = True) -> None:
        """Restore in place what `state_dict` returned.

        Args:
            state: The state.
            trusted: Make objects of the classes that it names. Otherwise it is read only if it
                names none, which runs no code.

        Raises:
            CheckpointError: It does not fit the objects.
        """
        self._write(state, None, trusted=trusted)

    def from_now(self, *, lost: str) -> ObjectState:
        """Return one that finds what has changed since this call, and not since the build.

        Args:
            lost: Why a change that cannot be restored is refused.
        """
        other = copy.copy(self)
        other._lost, other._late = lost, dict(self._late)
        other._built = other._signatures()
        return other

    @contextlib.contextmanager
    def kept(self, *, lost: str) -> Iterator[None]:
        """Restore on exit what changes within the context.

        Costs a copy of all values but those of data.

        Args:
            lost: Why a change that cannot be restored is refused.

        Raises:
            TaskError: There is one.
        """
        before = self.from_now(lost=lost)
        paths = [path for path in before._built if not path.startswith("data")]
        present = snapshot({"kept": before._taken(paths, before._whole, skip=True)})["kept"]
        yield
        changed = before._changed()
        before._taken(changed)  # refuses what cannot be restored
        self._write(present, changed)

    # Comparing ranks

    def digest(self) -> str:
        """Return a digest of all values as they were built."""
        return f"{zlib.crc32(repr(sorted(self._built.items())).encode()):08x}"

    def compared(self) -> dict[str, list[str]]:
        """Return two digests of each value: of all of it, and without what is a process's own.

        Without the globals of modules, which may say which rank a process is.
        """
        found: dict[str, list[str]] = {}
        for path, node in self._nodes.items():
            if not path.startswith("@"):
                name, its, told = _with_type(node), self._signature(node), self._told(node)
                found[name] = [repr(its.rest), repr(told.rest)]
                found |= {
                    f"{name} {key}": [repr(one), repr(told.attributes.get(key))]
                    for key, one in its.attributes.items()
                }
        return found

    def _told(self, node: _Node) -> Signature:
        return self._signature(node, told=True)

    def chosen(
        self, names: Collection[str], common: Collection[str], *, lost: str, remedy: str
    ) -> dict[str, Any]:
        """Return the values at some paths, as `compared` names them, for another rank.

        Args:
            names: The paths.
            common: The paths that all ranks have.
            lost: Why a value that cannot be restored is refused.
            remedy: What the user can do about it.

        Raises:
            TaskError: There is one that cannot be restored.
        """
        other = copy.copy(self)
        other._what, other._lost, other._remedy = "is another one on another rank", lost, remedy
        there = {path: _with_type(node) for path, node in self._nodes.items()}
        other._table = {
            key: path
            for key, path in self._table.items()
            if there[path] in common or there[path] not in names
        }
        parts: dict[str, set[str]] = {}
        for name in names:
            path, kind, *attribute = name.split(" ")
            parts.setdefault(f"{path} {kind}", set()).update(attribute)

        def content(node: _Node) -> tuple[Any, ...]:
            name = there[node.path]
            attributes = node.kind.attributes(node.value)
            sent = {key: part for key, part in attributes.items() if key in parts[name]}
            gone = [key for key in parts[name] if key not in attributes]
            return sent, gone, *([node.kind.read(node.value)] if name in names else [])

        wanted = [path for path, name in there.items() if name in parts and name in common]
        return other._taken(wanted, content)

    def take(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Restore the values of the first rank, which sends nothing to itself.

        What ranks built differently is built differently at a resume, too. So it is always saved.

        Args:
            state: What `chosen` returned on the first rank.
            names: What differs.

        Raises:
            CheckpointError: A value does not fit.
        """
        self.load_state_dict(state)
        self._look()
        for path, node in self._nodes.items():
            name, before = _with_type(node), self._built[path]
            attributes = {
                key: None if f"{name} {key}" in names else its
                for key, its in before.attributes.items()
            }
            rest = object() if name in names else before.rest
            self._built[path] = Signature(attributes, rest)

    # Finding and comparing values

    def _reach(self) -> dict[str, _Node]:
        """Return all objects below the roots that may change, by the first path to each."""
        found: dict[str, _Node] = {}
        seen = set(self._left_out)
        # not recursive: models may be nested deeper than Python's stack
        waiting: deque[tuple[str, Any]] = deque(self._roots.items())
        while waiting:
            path, value = waiting.popleft()
            if type(value) in ATOMS or id(value) in seen:
                continue
            try:
                kind = kind_of(value)
            except Exception:  # an object of the user's may raise anything
                kind = OPAQUE
            if kind is None:
                continue
            seen.add(id(value))
            path = (kind is not OPAQUE and named(value)) or path
            while path in found:  # as a closure's variable and a function's attribute of one name
                path += "'"
            if path == TASK:
                kind = ATTRIBUTES
            elif id(value) in self._stored and isinstance(value, torch.optim.Optimizer):
                kind = SAVED_OPTIMIZER
            if kind is BY_VALUE:
                self._tuples.append(value)
            else:
                found[path] = _Node(path, value, kind)
            if is_users(type(value)):
                waiting.append((f"{path}.class", type(value)))
            if plain_digest(value) is not None:
                continue
            try:
                waiting.extend((path + step, part) for step, part in list(kind.parts(value)))
            # objects of the user may raise anything
            except Exception:
                found[path] = _Node(path, value, OPAQUE)
        return found

    def _changed(self) -> list[str]:
        return [path for path, its in self._signatures().items() if its != self._built[path]]

    def _signatures(self) -> dict[str, Signature]:
        return {path: self._signature(node) for path, node in self._nodes.items()}

    def _signature(self, node: _Node, *, told: bool = False) -> Signature:
        """Return what changes when the value changes."""
        value = node.value
        if node.kind is OPAQUE:
            return Signature({}, type(value).__qualname__)
        if isinstance(value, Tensor):
            shape = None if is_lazy(value) else tuple(value.shape)
            flags = shape, str(value.dtype), is_trained(value)
            values = None if id(value) in self._stored else tensor_signature(value)
            return Signature({}, (flags, values))
        if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            return Signature({}, array_signature(value))
        if isinstance(value, (list, dict, set)) and not told:
            digest = plain_digest(value)
            if digest is not None and not getattr(value, "__dict__", None):
                return Signature({}, digest)
        try:
            attributes, rest = self._attributes(node), node.kind.read(value)
        # objects of the user may raise anything; `_taken` says what it means
        except Exception as problem:
            return Signature({}, type(problem).__name__)
        found = {name: self._sign(part, told) for name, part in attributes.items()}
        return Signature(found, (type(value).__qualname__, self._sign(rest, told)))

    def _sign(self, value: Any, told: bool) -> object:
        if type(value) in ATOMS and not told:
            return repr(value)
        file = io.BytesIO()
        try:
            _Pickler(file, self._table, told=told).dump(value)
        except Exception as problem:  # as above; another object at this place is noticed
            return type(problem).__name__, None if told else id(value)
        return zlib.crc32(file.getbuffer())

    def _made_of(self, node: _Node) -> object:
        """Return what changes with the arguments of which pickle would make an object."""
        file = io.BytesIO()
        try:
            if (arguments := node.kind.arguments(node.value)) is None:
                return None
            _Pickler(file, self._table).dump(arguments)
        except Exception:  # as above
            return None
        return zlib.crc32(file.getbuffer())

    # Saving

    def _taken(
        self,
        paths: Iterable[str],
        content_of: Callable[[_Node], tuple[Any, ...]] | None = None,
        *,
        skip: bool = False,
    ) -> dict[str, Any]:
        """Return what has changed at some paths, pickled together.

        Args:
            paths: The paths.
            content_of: Returns of an object the attributes, those that are gone, and the rest;
                None: what has changed.
            skip: Leave out what cannot be restored, instead of refusing it.
        """
        content: dict[str, Any] = {}
        names: set[str] = set()
        for path in paths:
            node = self._nodes[path]
            if node.kind is ITERATOR and not skip:
                self._refuse(path, node.value, "has moved on since it was built")
            if node.kind in (OPAQUE, ITERATOR):
                if self._what != ObjectState._what and not skip:  # another one on another rank
                    self._refuse(path, node.value, self._what)
                continue
            try:
                self._check_form(node)
                part = (content_of or self._changes)(node)
                tensors: list[Tensor] = []
                _Pickler(io.BytesIO(), self._table, tensors).dump(part)
                content[path] = (type(node.value).__qualname__, *part)
            except TaskError:
                if not skip:
                    raise
            # as above
            except Exception as problem:
                if not skip:
                    self._refuse_part(node, problem)
            else:
                if any(one.is_floating_point() for one in tensors):
                    names |= set(self._with_tensors(node, part))
        if not content:
            return {}
        file, tensors = io.BytesIO(), []
        _Pickler(file, self._table, tensors).dump(content)
        return {"pickle": file.getvalue(), "tensors": tensors, "names": sorted(names)}

    def _whole(self, node: _Node) -> tuple[Any, ...]:
        """Return all that there is of an object."""
        return self._attributes(node), None, node.kind.read(node.value)

    def _changes(self, node: _Node) -> tuple[Any, ...]:
        """Return the attributes of an object that have changed, those that are gone, and the rest.

        What has not changed stays as the resumed run builds it, which may have other options.
        """
        value = node.value
        if isinstance(value, Tensor) and id(value) in self._stored:
            return {}, (), (None, is_trained(value))
        now, before = self._signature(node), self._built[node.path]
        attributes = self._attributes(node)
        gone = [name for name in before.attributes if name not in attributes]
        attributes = {
            name: part
            for name, part in attributes.items()
            if name not in before.attributes or before.attributes[name] != now.attributes.get(name)
        }
        return attributes, gone, *([] if now.rest == before.rest else [node.kind.read(value)])

    def _attributes(self, node: _Node) -> dict[str, Any]:
        """Return the attributes of an object, without those that a resumed run makes again.

        A handle that is opened at its first use was None, or not there, when the run was built.
        """
        attributes = node.kind.attributes(node.value)
        known = self._built.get(node.path) if hasattr(self, "_built") else None
        if known is None:
            return attributes
        for name, part in list(attributes.items()):
            before = known.attributes.get(name)
            if before not in (None, "None") or type(part) in ATOMS or id(part) in self._table:
                continue
            try:
                _Pickler(io.BytesIO(), self._table, []).dump(part)
            except Exception:  # as above
                is_position = hasattr(type(part), "__next__") or isinstance(part, io.IOBase)
                if is_position or self._late.setdefault(f"{node.path}.{name}", part) is not part:
                    raise
                attributes[name] = None
                if before is None:
                    del attributes[name]
        return attributes

    def _check_form(self, node: _Node) -> None:
        """Refuse what no newly built object can be given: other members, other arguments."""
        built_as = self._types[node.path]
        if node.kind is OPAQUE or issubclass(built_as, (Tensor, LazyModuleMixin)):
            return  # they change as their shapes become known
        if self._made_of(node) != self._arguments[node.path]:
            self._refuse(node.path, node.value, "is made of other arguments than before")
        if built_as is not type(node.value):
            self._refuse(node.path, node.value, "is of another class than when it was built")
        if not isinstance(node.value, nn.Module):
            return
        before, now = self._members[node.path], _members(node.value)
        for name in sorted(before.keys() | now.keys(), key=before.__contains__):
            if before.get(name) != now.get(name):
                how = "replaced" if name in now else "removed"
                how = how if name in before else "registered"
                parameters = node.value._parameters
                what = "hook" if name.startswith("hooks[") else "module"
                what = "parameter" if name in parameters else what
                self._refuse(
                    f"{node.path}.{name}", None, f"is a {what} that was {how} after it was built"
                )

    def _with_tensors(self, node: _Node, content: tuple[Any, ...]) -> Iterator[str]:
        """Yield the attributes of the task under which tensors are saved."""
        root, _, below = node.path.partition(".")
        if root == TASK and below:
            yield below.partition(".")[0].partition("[")[0]
        for name, part in content[0].items() if node.path == TASK else ():
            tensors: list[Tensor] = []
            _Pickler(io.BytesIO(), self._table, tensors).dump(part)
            if tensors:
                yield name

    def _refuse_part(self, node: _Node, problem: Exception) -> NoReturn:
        """Refuse the part of an object that pickle refuses."""
        with contextlib.suppress(Exception):  # of `read`
            for step, part in node.kind.parts(node.value):
                if type(part) in ATOMS or id(part) in self._table:
                    continue
                try:
                    _Pickler(io.BytesIO(), self._table, []).dump(part)
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
            for path, content in sorted(found.items(), key=self._has_hashes):
                if paths is None or path in paths:
                    where = self._text(path)
                    node = self._nodes[path]
                    kind, attributes, gone, *rest = content
                    is_other = kind != type(node.value).__qualname__
                    if is_other and not isinstance(node.value, (LazyModuleMixin, Tensor)):
                        raise TypeError(f"it is a {type(node.value).__qualname__}, not a {kind}")
                    if gone is None:  # it has all that is there
                        gone = node.kind.attributes(node.value).keys() - attributes.keys()
                    for name in gone:
                        node.kind.remove(node.value, name)
                    for name, part in attributes.items():
                        node.kind.put(node.value, name, part)
                    for state in rest:
                        node.kind.write(node.value, state)
        # as above
        except Exception as problem:
            raise CheckpointError(
                f"the checkpoint's {where} does not fit what is there now "
                f"({type(problem).__name__}: {problem}); continue with the code, the version "
                "and the configuration that wrote it, or start a new run"
            ) from problem

    def _has_hashes(self, item: tuple[str, Any]) -> bool:
        return item[0] in self._nodes and isinstance(self._nodes[item[0]].value, (set, dict))

    def at(self, path: str) -> object:
        """Return the object at a path."""
        if path not in self._nodes:
            raise LookupError(f"there is no {self._text(path)}")
        return self._nodes[path].value

    @property
    def device(self) -> torch.device:
        """Where tensors go that were on a device."""
        return self._device


def dumps(value: object, what: str) -> dict[str, Any]:
    """Return a value as `state_dict` returns objects: a pickle as bytes, and its tensors.

    Raises:
        TaskError: pickle refuses it.
    """
    file = io.BytesIO()
    tensors: list[Tensor] = []
    try:
        _Pickler(file, {}, tensors).dump(value)
    except Exception as problem:  # an object of the user's may raise anything
        raise TaskError(
            f"{what} cannot be saved ({problem}); a state holds what pickle takes: tensors, "
            "arrays, numbers, strings and collections of them"
        ) from problem
    return {"pickle": file.getvalue(), "tensors": tensors, "names": []}


def loads(state: Mapping[str, Any]) -> Any:
    """Return the value of which `dumps` made a state."""
    return _Unpickler(state, ObjectState({}), trusted=True).load()


class _Pickler(pickle.Pickler):
    """Writes objects; those that a run builds anew by their path, and tensors beside the pickle.

    Args:
        file: Receives the pickle.
        table: The paths of objects by id.
        tensors: Receives the tensors; None: only their signatures are written.
        told: Leave out what may differ from process to process: of an absolute path all but the
            name, all of one below the directory of temporary files, and the number of a device.
    """

    def __init__(
        self,
        file: io.BytesIO,
        table: Mapping[int, str],
        tensors: list[Tensor] | None = None,
        *,
        told: bool = False,
    ) -> None:
        super().__init__(file, 5)
        self._table, self._tensors, self._told = table, tensors, told
        self._numbers: dict[int, tuple[int, Tensor]] = {}

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for an object in the pickle; None for all others."""
        if type(value) in ATOMS:
            if self._told and type(value) is str and os.path.isabs(value):
                is_temporary = Path(value).is_relative_to(tempfile.gettempdir())
                return "path", "" if is_temporary else Path(value).name
            return None
        if (path := self._table.get(id(value))) is not None:
            return (
                ("at", path, type(value).__qualname__) if self._tensors is None else ("at", path)
            )
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if self._told and isinstance(value, torch.device):
            return "device", value.type
        return None

    def _of_tensor(self, value: Tensor) -> Any:
        how = isinstance(value, nn.Parameter), is_trained(value), value.device.type != "cpu"
        if self._tensors is None:
            return "signature", tensor_signature(value), how
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._tensors), value  # kept, as is its id
            self._tensors.append(value.detach())
        return "tensor", self._numbers[id(value)][0], *how


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written, and takes what a run has built from it.

    Args:
        state: The pickle and its tensors.
        objects: What the run has built.
        trusted: Name classes and functions; else only what pickle itself makes is read.
    """

    def __init__(self, state: Mapping[str, Any], objects: ObjectState, *, trusted: bool) -> None:
        super().__init__(io.BytesIO(state["pickle"]))
        self._saved, self._objects, self._trusted = state, objects, trusted
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, written: Any) -> Any:
        """Return the object for which something stands in the pickle."""
        kind, name, *rest = written
        if kind == "at":
            return self._objects.at(name)
        if kind == "module" and self._trusted:
            return sys.modules[name]
        if kind == "tensor":
            if name not in self._tensors:
                self._tensors[name] = self._tensor(self._saved["tensors"][name], *rest)
            return self._tensors[name]
        raise pickle.UnpicklingError(f"{kind} cannot be read")

    def _tensor(self, saved: Tensor, is_parameter: bool, trains: bool, on_device: bool) -> Tensor:
        where = self._objects.device if on_device else torch.device("cpu")
        value = saved.detach().to(where, copy=True)
        return nn.Parameter(value, trains) if is_parameter else value.requires_grad_(trains)

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of a module that this run has imported.

        That is enough to run any code: `checkpoint.check_owner` says whose pickles are read.

        Raises:
            pickle.UnpicklingError: The state may not name it.
        """
        unsafe = module == "builtins" and not isinstance(getattr(builtins, name, None), type)
        unsafe = unsafe and name not in ("getattr", "iter", "reversed")
        if module not in sys.modules or unsafe:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)

    def load(self) -> Any:
        """Return what was saved.

        Raises:
            pickle.UnpicklingError: It names or calls something, and is not trusted.
        """
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


def _members(module: nn.Module) -> dict[str, int]:
    members = {**module._parameters, **module._modules}
    hooks = {f"hooks[{n}]": hook for n, hook in enumerate(hooks_of(module))}
    return {name: id(one) for name, one in (members | hooks).items() if one is not None}


def move_modules(task: object, data: object, device: torch.device) -> None:
    """Move the modules in a task's attributes, such as an average of the model, to a device."""
    for _, module in held_modules(task, {id(one) for one in parts_left_out(data)}):
        if all(one.device.type == "cpu" for one in (*module.parameters(), *module.buffers())):
            module.to(device)


def parts_left_out(data: object) -> list[object]:
    """Return the streams of a `Data`, whose positions are saved elsewhere."""
    splits = [getattr(data, name, None) for name in ("train", "val", "test")]
    return [split for split in splits if split is not None and is_stream(split)]


def run_objects(
    task: object,
    model: nn.Module,
    *,
    trained: Iterable[object] = (),
    data: object = None,
    optimizers: Iterable[object] = (),
    whole_task: bool = True,
) -> ObjectState:
    """Return what a run's code can reach, right after the run was built.

    Args:
        task: The task; None for the model alone.
        model: Its model.
        trained: All parameters of the optimizer.
        data: The samples.
        optimizers: The optimizers, whose own states are saved elsewhere.
        whole_task: Include the task's attributes; a task may save its state itself.
    """
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
        left_out=[*parts_left_out(data), *([] if whole_task else [task])],
        device=next((p.device for p in model.parameters()), None),
        names={TASK: type(task).__name__},
    )
