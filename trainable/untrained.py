"""Find what receives gradients in `loss()` and is in no optimizer: it would never change.

What must not live here: parameters of the model, which `param_groups()` may leave out on purpose.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainable.optimizers import builds_own
from trainable.reachable import by_attributes, kind_of
from trainable.task import Batch, Task

_CODE = (type, types.ModuleType, types.FunctionType)
_CALLS = 8
"""The losses that are looked at: walking their graphs takes time."""
_SHOWN = 3


class Untrained:
    """Stands in for a task in a step, and looks at the graphs of its losses.

    A tensor that one loss alone uses, such as inputs that require a gradient, is not looked for:
    it is made anew for each batch. Nor is one that a task updates by itself.
    """

    def __init__(self, task: Task, model: nn.Module, trained: Iterable[Tensor]) -> None:
        self._task, self._model = task, model
        self._known = {id(p) for p in (*model.parameters(), *trained)}
        self._calls = 0
        self._found: dict[int, tuple[Tensor, Tensor, int]] = {}

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        """Return the task's loss of a batch."""
        result = self._task.loss(model, batch)
        self._calls += 1
        loss = result[0] if isinstance(result, (tuple, list)) and result else None
        if self._calls <= _CALLS and isinstance(loss, Tensor):
            for leaf in _leaves(loss):
                if id(leaf) not in self._known:
                    _, value, count = self._found.get(id(leaf), (leaf, leaf.detach().clone(), 0))
                    self._found[id(leaf)] = leaf, value, count + 1
        return result

    @property
    def is_suspected(self) -> bool:
        """Whether there may be such a tensor: a further step tells."""
        return bool(self._found)

    def problem(self) -> str | None:
        """Return the sentence for what is not trained; None if all is. Call it after the hooks."""
        later = {id(p) for p in self._model.parameters()}  # registered in the first pass
        same = [
            leaf
            for leaf, value, count in self._found.values()
            if id(leaf) not in later
            and count > 1
            and leaf.shape == value.shape
            and bool((leaf == value).all())
        ]
        optimized = _in_optimizers() if same else set()
        found = [leaf for leaf in same if id(leaf) not in optimized]
        return _described(self._task, found) if found else None


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that receive gradients when the loss is differentiated."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            yield leaf
        waiting.extend(following for following, _ in node.next_functions)


def _in_optimizers() -> set[int]:
    """Return the ids of the parameters of all optimizers, which a task may step by itself."""
    kinds = (one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer))
    groups = (group for one in kinds for group in getattr(one, "param_groups", ()))
    return {id(p) for group in groups for p in group["params"]}


def _described(task: Task, found: list[Tensor]) -> str:
    wanted = {id(leaf): f"a tensor of shape {tuple(leaf.shape)}" for leaf in found}
    roots: dict[str, str] = {}
    for place, root, leaf in _places(task, set(wanted)):
        wanted[id(leaf)] = place
        roots[root] = f"*{root}.parameters()" if root != place else root
    names = list(wanted.values())
    more = [f"and {len(names) - _SHOWN} more"] * (len(names) > _SHOWN)
    listed = ", ".join(roots.values()) or "..."
    if builds_own(task):
        line = f"add `[{listed}]` to the parameters of an optimizer in build_optimizer()"
    elif type(task).param_groups is not Task.param_groups:
        line = f'add `{{"params": [{listed}]}}` to the list that param_groups() returns'
    else:
        line = (
            "write `def param_groups(self, model): return [*super().param_groups(model), "
            f'{{"params": [{listed}]}}]`'
        )
    frozen = " and ".join(f"`{root}.requires_grad_(False)`" for root in roots)
    return (
        f"loss() gives gradients to {', '.join([*names[:_SHOWN], *more])}, in no optimizer, which "
        f"would never change; what is trained is in a parameter group; {line}, or freeze what is "
        f"not to be trained with {frozen or 'requires_grad_(False)'}"
    )


def _places(task: Task, wanted: set[int]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield where a task holds tensors: the place, the outermost module there, and the tensor."""
    seen = {id(task)}
    waiting: deque[tuple[str, str, Any]] = deque([("self", "", task)])
    while waiting:
        owner, module, value = waiting.popleft()
        kind = by_attributes(task) if value is task else kind_of(value)
        for step, part in () if kind is None else kind.parts(value):
            if id(part) in seen or isinstance(part, (Dataset, *_CODE)):
                continue
            seen.add(id(part))
            place = owner + step
            if id(part) in wanted:
                yield place, module or place, part
            root = module or (place if isinstance(part, nn.Module) else "")
            waiting.append((place, root, part))
