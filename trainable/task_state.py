"""What a task holds beside its model, saved with the run: the default of `Task.state_dict`.

What must not live here: how a change is found and put back (`object_state.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainable.object_state import ObjectState, parts_of
from trainable.object_values import kind_of

_HELD = "held"
_REMEDY = (
    "make it in the constructor or in build_model(), of modules, tensors, generators and plain "
    "data; or override Task.state_dict() and load_state_dict() to save what counts of it"
)
_MODULE_REMEDY = (
    "build it in build_model() with the shape that it will have, as a parameter or by "
    'self.register_buffer("name", tensor); or save it by get_extra_state() and set_extra_state()'
)


class TaskState(ObjectState):
    """What has changed below a task; it is found again by the task while somebody keeps it.

    Args:
        task: As its model has just been built, and not yet restored.
        model: The run's; what the task holds of it is no concern of the task.
        trained: All parameters of the optimizer, which are saved with the run.
        data: Its samples.
    """

    def __init__(
        self, task: object, model: nn.Module, trained: Iterable[Tensor], data: object
    ) -> None:
        stored = [*_of_data(data), *model.modules(), *model.buffers(), *trained]
        device = next((p.device for p in model.parameters()), None)
        super().__init__(
            task, name=type(task).__name__, remedy=_REMEDY, stored=_by_id(stored), device=device
        )
        # The task does not hold it: a cycle would keep the model when the run has ended.
        _OF_TASKS[id(task)] = self


_OF_TASKS: weakref.WeakValueDictionary[int, TaskState] = weakref.WeakValueDictionary()


def modules_state(
    model: nn.Module, trained: Iterable[Tensor], task: object = None, data: object = None
) -> ObjectState:
    """Return what changes in a model and is no part of its `state_dict()`."""
    stored = _by_id([*_of_data(data), *trained, *([] if task is None else [task])])
    device = next((p.device for p in model.parameters()), None)
    return ObjectState(
        model, name="model", remedy=_MODULE_REMEDY, stored=stored, model=model, device=device
    )


def saved(task: object) -> dict[str, Any]:
    """Return what has changed below a task that is being trained; nothing of another one."""
    state = _OF_TASKS.get(id(task))
    entries = [] if state is None else state.state_dict()
    return {_HELD: entries} if entries else {}


def restore(task: object, state: dict[str, Any]) -> None:
    """Put back what `saved` returned; what a task added to it is its own affair."""
    known = _OF_TASKS.get(id(task))
    if known is not None:
        known.load_state_dict(state.get(_HELD, []))


def held_modules(task: object, data: object = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that a task holds, each with the path to it."""
    seen = set(_by_id(_of_data(data)))
    waiting: deque[tuple[str, Any]] = deque([("", task)])
    while waiting:
        path, value = waiting.popleft()
        kind = kind_of(value) if path else "object"
        if id(value) in seen or isinstance(value, Dataset):
            continue
        if kind == "module":
            yield path, value
        elif kind in ("object", "container"):
            seen.add(id(value))
            waiting.extend(
                (f"{path}.{key}" if path else str(key), part)
                for (_, key), part in parts_of(value, kind)
            )


def move_modules(task: object, data: object, device: torch.device) -> None:
    """Move what modules a task holds, such as an average of the model, to where the model is."""
    for _, module in held_modules(task, data):
        if all(one.device.type == "cpu" for one in (*module.parameters(), *module.buffers())):
            module.to(device)


def _of_data(data: object) -> list[object]:
    """The parts of a `Data` that are no state: tensors, and collections of samples."""
    splits = [getattr(data, name, None) for name in ("train", "val")]
    plain = [split for split in splits if isinstance(split, (tuple, list))]
    tensors = [one for split in plain if isinstance(split, tuple) for one in split]
    return [*plain, *tensors] if data is not None else []


def _by_id(values: Iterable[object]) -> dict[int, object]:
    return {id(value): value for value in values}
