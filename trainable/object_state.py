"""ObjectState: saves attributes of tasks and modules that no `state_dict()` includes.

A module's `state_dict()` leaves out its attributes, mode and non-persistent buffers, and which of
its tensors require gradients. No `state_dict()` has the attributes of a task. This module compares
all values below an object with those right after it was built. It returns changed values as plain
data, and restores them into a newly built object. A change that cannot be restored is an error.
This costs a pass over the objects at each save, and nothing in a step. What must not live here:
signatures and encodings of single values (`object_values.py`), or what of a run is saved
(`train_state.py`).
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from trainable.errors import CheckpointError, TaskError
from trainable.object_paths import (
    Path,
    follow,
    from_lists,
    has_member,
    member,
    members_of,
    put_member,
    remove_member,
    to_lists,
)
from trainable.object_values import (
    STATEFUL_KINDS,
    Stored,
    decode,
    digest_of,
    encode,
    get_internal_state,
    is_plain_key,
    is_rebuildable,
    restore_tensor,
    set_internal_state,
    signature_of,
    signatures_equal,
    tensor_entry,
    told_of,
    value_kind,
)
from trainable.snapshot import snapshot

_MANY = 1000
"""A data set's collection with more members is compared by its length alone."""


class _Found(NamedTuple):
    """The current value at a path."""

    kind: str
    signature: object
    value: Any
    in_data: bool


class ObjectState:
    """What has changed below an object since it was built.

    Args:
        root: A task, or a model.
        name: Its name in messages.
        stored: Tensors and objects whose state is saved elsewhere.
        model: The model. Values of its parameters and persistent buffers are left out, because
            its `state_dict()` has them.
        remedy: What the user can do about a value that cannot be saved.
    """

    _lost = "a resumed run builds it again and would lose the change"
    _what = ""

    def __init__(
        self,
        root: object,
        *,
        name: str,
        remedy: str,
        stored: Mapping[int, object],
        model: nn.Module | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._root, self._name, self._remedy = root, name, remedy
        self._stored: Stored = dict(stored)  # keeps the objects, so that no id is used again
        self._device = device or torch.device("cpu")
        self._model = model
        self._created_late: set[Path] = set()
        self._built = self._signatures()

    def state_dict(self) -> list[Any]:
        """Return what has changed since the root was built, as plain data and tensors.

        Raises:
            TaskError: A value that was changed or created since cannot be restored.
        """
        now = self._walk()
        entries = []
        for path, found in now.items():
            before = self._built.get(path)
            if before is None and path[:-1] in self._created_late:
                self._accept(path, found)
            elif before is None or not signatures_equal(before.signature, found.signature):
                if path in self._created_late:
                    self._refuse(path, found.value, "has changed, and was made after it was built")
                entry = self._entry(path, before, found)
                if entry is not None:
                    entries.append([to_lists(path), *entry])
        entries += [
            [to_lists(path), "gone", None]
            for path, before in self._built.items()
            if path not in now and path[:-1] in now and self._was_removed(path, before, now)
        ]
        return entries

    def from_now(self, *, lost: str) -> ObjectState:
        """Return one that finds what has changed since this call, and not since the build.

        Args:
            lost: Why a change that cannot be restored is refused.
        """
        other = copy.copy(self)
        other._lost = lost
        other._created_late = set()
        other._built = other._signatures()
        return other

    @contextlib.contextmanager
    def kept(self, *, lost: str) -> Iterator[None]:
        """Restore on exit what changes within the context.

        Costs a copy of all values but those of data sets.

        Args:
            lost: Why a change that cannot be restored is refused.

        Raises:
            TaskError: There is one.
        """
        before = self.from_now(lost=lost)
        values = snapshot({"values": self._present()})["values"]
        had = {path: entry for path, *entry in map(from_lists, values)}
        yield
        for path, *_ in map(from_lists, before.state_dict()):
            if path in had:
                self._restore(path, *had[path])
            elif path in before._built or path[-1][0] not in ("a", "b"):
                before._refuse(path, None, "has changed")
            else:
                remove_member(follow(self._root, path[:-1]), path[-1])

    def load_state_dict(self, entries: list[Any]) -> None:
        """Restore what `state_dict` returned, in place where that is possible.

        Raises:
            CheckpointError: A value does not fit the root.
        """
        for path, kind, payload in map(from_lists, entries):
            try:
                self._restore(path, kind, payload)
            except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as problem:
                raise CheckpointError(
                    f"the checkpoint's {self._text(path)} does not fit what is there now "
                    f"({type(problem).__name__}: {problem}); continue with the code, the version "
                    "and the configuration that wrote it, or start a new run"
                ) from problem

    # Comparing ranks

    def digest(self) -> str:
        """Return a digest of all values as they were built."""
        built = [(path, found.kind, found.signature) for path, found in self._built.items()]
        return digest_of(repr(built))

    def compared(self) -> dict[str, list[str]]:
        """Return two digests of each value: of all of it, and without what is a process's own."""
        return {
            repr(path): [
                digest_of(repr((found.kind, found.signature))),
                digest_of(f"{found.kind} {told_of(found.kind, found.value, found.signature)}"),
            ]
            for path, found in self._walk().items()
        }

    def chosen(self, names: Collection[str], *, lost: str, remedy: str) -> list[Any]:
        """Return the entries of some values, as `compared` names them, for another rank.

        Raises:
            TaskError: There is one that cannot be restored.
        """
        other = copy.copy(self)
        other._what, other._lost, other._remedy = "is another one on another rank", lost, remedy
        return [
            [to_lists(path), *entry]
            for path, found in self._walk().items()
            if repr(path) in names and (entry := other._entry(path, found, found)) is not None
        ]

    def take(self, entries: list[Any], names: Collection[str], first: Collection[str]) -> None:
        """Restore the entries of the first rank, and remove what it does not have.

        What ranks built differently is built differently at a resume, too. So it is always saved.

        Args:
            entries: What `chosen` returned on the first rank.
            names: What differs.
            first: What the first rank has.

        Raises:
            CheckpointError: A value does not fit the root.
        """
        for path in self._walk():
            above = repr(path[:-1])
            if repr(path) not in first and above in first and above not in names:
                entries = [*entries, [to_lists(path), "gone", None]]
        self.load_state_dict(entries)
        self._built = self._signatures()
        for path, found in self._built.items():
            if repr(path) in names:
                form = found.signature if isinstance(found.signature, tuple) else ()
                self._built[path] = found._replace(signature=(*form, "is always saved"))

    # Finding values

    def _signatures(self) -> dict[Path, _Found]:
        """Return what is compared later, without references to the values."""
        return {path: found._replace(value=None) for path, found in self._walk().items()}

    def _walk(self) -> dict[Path, _Found]:
        found: dict[Path, _Found] = {}
        seen = set(self._stored) - {id(self._root)}
        # not recursive: models may be nested deeper than Python's stack
        waiting: deque[tuple[Path, Any, bool]] = deque([((), self._root, False)])
        while waiting:
            path, value, in_data = waiting.popleft()
            kind = "object" if value is self._root and not path else value_kind(value)
            if isinstance(value, nn.Module):
                kind = "module"
            if kind == "opaque" or isinstance(value, RemovableHandle):
                continue
            if kind == "tensor":
                is_member = isinstance(value, nn.Parameter) or path[-1][0] in "pb"
                if is_member or id(value) not in self._stored:
                    found[path] = _Found(kind, self._sign_tensor(path, value), value, in_data)
                continue
            if kind == "container" and is_rebuildable(value, self._stored, large=in_data):
                if in_data and len(value) > _MANY:
                    found[path] = _Found("container", ("length", len(value)), value, in_data)
                else:
                    found[path] = _Found("value", signature_of(value), value, in_data)
                continue
            if kind == "value":
                found[path] = _Found(kind, signature_of(value), value, in_data)
                continue
            if id(value) in seen:
                continue
            seen.add(id(value))
            if kind in STATEFUL_KINDS:
                found[path] = _Found(kind, signature_of(value), value, in_data)
                continue
            found[path] = _Found(kind, _form(value, kind), value, in_data)
            in_data = in_data or isinstance(value, Dataset)
            members = members_of(value, kind)
            waiting.extend(((*path, step), part, in_data) for step, part in members)
        return found

    def _is_saved_elsewhere(self, path: Path, tensor: Tensor) -> bool:
        """Whether a tensor's values are saved elsewhere."""
        step = path[-1][0] if path else ""
        if step == "b" and self._model is not None and all(one in "mb" for one, _ in path):
            owner = follow(self._root, path[:-1])
            return path[-1][1] not in owner._non_persistent_buffers_set
        return id(tensor) in self._stored

    def _sign_tensor(self, path: Path, tensor: Tensor) -> object:
        if is_lazy(tensor):
            return ("tensor", None, None, tensor.requires_grad)
        flags = ("tensor", tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        return flags if self._is_saved_elsewhere(path, tensor) else (*flags, signature_of(tensor))

    # Saving

    def _present(self) -> list[Any]:
        """Return the entries of all values that could be restored, but for those of data sets."""
        return [
            [to_lists(path), *entry]
            for path, found in self._walk().items()
            if not found.in_data
            and (
                found.kind == "tensor"
                or (found.kind == "value" and not self._is_in_tuple(path))
                or (found.kind in STATEFUL_KINDS and get_internal_state(found.value) is not None)
            )
            and (entry := self._entry(path, found, found)) is not None
        ]

    def _is_in_tuple(self, path: Path) -> bool:
        return path[-1][0] == "i" and isinstance(follow(self._root, path[:-1]), tuple)

    def _accept(self, path: Path, found: _Found) -> None:
        """Treat a value created after the build as a constant: a resumed run creates it again."""
        self._built[path] = found._replace(value=None)
        self._created_late.add(path)

    def _entry(self, path: Path, before: _Found | None, found: _Found) -> tuple[str, Any] | None:
        value = found.value
        step = path[-1][0] if path else ""
        if found.kind == "tensor":
            if isinstance(value, nn.Parameter):
                self._check_parameter(path, before, value)
            if is_lazy(value) or self._is_saved_elsewhere(path, value):
                known = before is not None and before.kind == "tensor"
                if known and _shape(before) in (None, value.shape):
                    return "flags", value.requires_grad
            persistent = None
            if step == "b":
                owner = follow(self._root, path[:-1])
                persistent = path[-1][1] not in owner._non_persistent_buffers_set
            return "tensor", tensor_entry(value, persistent)
        if found.kind == "value":
            if self._is_in_tuple(path):
                self._refuse(path, value, "has another value than when it was built, in a tuple")
            return "value", encode(value)
        if found.kind in STATEFUL_KINDS and before is not None and before.kind == found.kind:
            state = get_internal_state(value)
            if state is not None:
                return found.kind, state
            self._refuse(path, value, "has moved on since it was built")
        if before is None or before.kind != found.kind:
            is_new = before is None or before.signature == signature_of(None)
            if is_new and found.kind in ("object", "container") and not self._holds_state(value):
                self._accept(path, found)
                return None
            self._refuse(path, value, "was made after the model was built")
        if found.kind == "module" or not found.in_data:
            self._refuse(path, value, "has another type or other members than when it was built")
        return None

    def _check_parameter(self, path: Path, before: _Found | None, value: Tensor) -> None:
        if before is None or before.kind != "tensor":
            self._refuse(path, value, "is a parameter that was registered after it was built")
        if _shape(before) not in (None, value.shape):
            self._refuse(path, value, "is a parameter with another shape than when it was built")

    def _was_removed(self, path: Path, before: _Found, now: dict[Path, _Found]) -> bool:
        if now[path[:-1]].kind not in ("object", "module", "container"):
            return False  # the parent was replaced as a whole
        step, _ = path[-1]
        if step in ("p", "m"):
            self._refuse(path, None, "was there when it was built, and is gone")
        if before.kind == "opaque" or step in ("i", "k", "v"):
            return False
        return not has_member(follow(self._root, path[:-1]), path[-1])

    def _holds_state(self, value: object) -> bool:
        below = ObjectState(
            value, name="", remedy="", stored={**self._stored, id(self._root): self._root}
        )
        return any(
            one.kind == "tensor" or one.kind == "module" or one.kind in STATEFUL_KINDS
            for one in below._built.values()
        )

    def _refuse(self, path: Path, value: object, what: str) -> NoReturn:
        shown = "" if value is None else f" (an object of type {type(value).__qualname__})"
        what = self._what or what
        raise TaskError(f"{self._text(path)}{shown} {what}; {self._lost}; {self._remedy}")

    def _text(self, path: Path) -> str:
        text = self._name
        for step, key in path:
            text += f"[{key!r}]" if step in ("i", "k", "v") else f".{key}"
        return text

    # Restoring

    def _restore(self, path: Path, kind: str, payload: Any) -> None:
        owner, step = follow(self._root, path[:-1]), path[-1]
        if kind == "gone":
            remove_member(owner, step)
            return
        live: Any = member(owner, step) if has_member(owner, step) else None
        if kind == "flags":
            if live.requires_grad != payload:  # a lazy parameter rejects even an equal value
                live.requires_grad_(payload)
        elif kind == "tensor":
            tensor = restore_tensor(live, payload, self._device)
            if tensor is not live:
                put_member(owner, step, tensor, persistent=payload.get("persistent"))
        elif kind == "value":
            value = decode(payload, live, self._device)
            if value is not live:
                put_member(owner, step, value)
        else:
            if value_kind(live) != kind:
                raise TypeError(f"it is a {type(live).__qualname__}")
            set_internal_state(live, payload)


def _form(value: Any, kind: str) -> object:
    """Return what is compared of a container or an object in addition to its members."""
    if isinstance(value, LazyModuleMixin) and value.cls_to_become is not None:
        return kind, value.cls_to_become.__qualname__
    name = type(value).__qualname__
    if kind != "container":
        return kind, name
    keys = tuple(map(repr, filter(is_plain_key, value))) if isinstance(value, dict) else ()
    return kind, name, len(value), keys


def _shape(found: _Found | None) -> object:
    """Return the shape that a tensor had; None if it was lazy and had no shape yet."""
    assert found is not None
    assert isinstance(found.signature, tuple)
    return None if found.signature[1] is None else torch.Size(found.signature[1])
