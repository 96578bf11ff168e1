"""TaskState: what has changed in a task's attributes; the default of `Task.state_dict`.

What must not live here: how a change is found and restored (`object_state.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainable.object_paths import members_of
from trainable.object_state import ObjectState
from trainable.object_values import value_kind
from trainable.splits import is_stream

_HELD = "held"
_REMEDY = (
    "make it in the constructor or in build_model(), of modules, tensors, generators and plain "
    "data; or override Task.state_dict() and load_state_dict() to save what matters of it"
)
_MODULE_REMEDY = (
    "build it in build_model() with the shape that it will have, as a parameter or by "
    'self.register_buffer("name", tensor); or save it by get_extra_state() and set_extra_state()'
)


class TaskState(ObjectState):
    """What has changed in a task since it was built; `saved` and `restore` look it up by task.

    Args:
        task: The task, after it has built its model and before anything is restored.
        model: The run's model. References of the task to it are not saved.
        trained: All parameters of the optimizer, which are saved with the run.
        data: The task's samples.
    """

    def __init__(
        self, task: object, model: nn.Module, trained: Iterable[Tensor], data: object
    ) -> None:
        stored = [*_of_data(data), *model.modules(), *model.buffers(), *trained]
        device = next((p.device for p in model.parameters()), None)
        super().__init__(
            task, name=type(task).__name__, remedy=_REMEDY, stored=_by_id(stored), device=device
        )
        # Not an attribute of the task: the cycle would keep the model in memory after the run.
        _STATES[id(task)] = self


_STATES: weakref.WeakValueDictionary[int, TaskState] = weakref.WeakValueDictionary()
"""The state of each task in training, by the task's id."""


def modules_state(
    model: nn.Module, trained: Iterable[object], task: object = None, data: object = None
) -> ObjectState:
    """Return the state of a model's modules that is not in `model.state_dict()`."""
    stored = _by_id([*_of_data(data), *trained, *([] if task is None else [task])])
    device = next((p.device for p in model.parameters()), None)
    return ObjectState(
        model, name="model", remedy=_MODULE_REMEDY, stored=stored, model=model, device=device
    )


def saved(task: object) -> dict[str, Any]:
    """Return what has changed in a task in training; empty for a task that is not trained."""
    state = _STATES.get(id(task))
    entries = [] if state is None else state.state_dict()
    return {_HELD: entries} if entries else {}


def restore(task: object, state: dict[str, Any]) -> None:
    """Restore what `saved` returned; entries that the task added are ignored."""
    known = _STATES.get(id(task))
    if known is not None:
        known.load_state_dict(state.get(_HELD, []))


def held_modules(task: object, data: object = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules in a task's attributes, each with the path to it."""
    seen = set(_by_id(_of_data(data)))
    waiting: deque[tuple[str, Any]] = deque([("", task)])
    while waiting:
        path, value = waiting.popleft()
        kind = value_kind(value) if path else "object"
        if id(value) in seen or isinstance(value, Dataset):
            continue
        if kind == "module":
            yield path, value
        elif kind in ("object", "container"):
            seen.add(id(value))
            waiting.extend(
                (f"{path}.{key}" if path else str(key), part)
                for (_, key), part in members_of(value, kind)
            )


def move_modules(task: object, data: object, device: torch.device) -> None:
    """Move the modules in a task's attributes, such as an average of the model, to a device."""
    for _, module in held_modules(task, data):
        if all(one.device.type == "cpu" for one in (*module.parameters(), *module.buffers())):
            module.to(device)


def _of_data(data: object) -> list[object]:
    """Return the parts of a `Data` that are not saved: tensors, streams, lists of samples."""
    splits = [getattr(data, name, None) for name in ("train", "val", "test")]
    plain = [split for split in splits if isinstance(split, (tuple, list)) or is_stream(split)]
    tensors = [one for split in plain if isinstance(split, tuple) for one in split]
    return [*plain, *tensors] if data is not None else []


def _by_id(values: Iterable[object]) -> dict[int, object]:
    return {id(value): value for value in values}
