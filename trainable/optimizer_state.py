"""Save an optimizer's state, and restore it into one that is newly built.

Hyperparameters stay as built: a run may resume with the moments of another run and with other
hyperparameters. An option of a group that the optimizer itself has changed since it was built,
such as a counter, is a part of its state. What must not live here: files, and what else a run
saves (`train_state.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainable.optim import CombinedOptimizer, members

_OWN_OPTIONS = ("initial_lr", "lr_multiplier")
"""Options that this project adds to an optimizer's parameter groups."""
_CHANGED = "gradsweep_changed"
"""The key of a saved group with the names of the options that the optimizer has changed."""


class OptimizerState:
    """The state of a run's optimizer, or of its optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._built = [_options(one) for one in members(optimizer)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its tensors are not copies."""
        states = [
            _with_changes(one, built)
            for one, built in zip(members(self._optimizer), self._built, strict=True)
        ]
        return {"optimizers": states} if self._is_combined else states[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        if ("optimizers" in state) != self._is_combined:
            raise ValueError("one of them has several optimizers, the other a single one")
        states = state["optimizers"] if self._is_combined else [state]
        optimizers = members(self._optimizer)
        if len(states) != len(optimizers):
            raise ValueError(f"it has {len(states)} optimizers, the task {len(optimizers)}")
        for one, saved in zip(optimizers, states, strict=True):
            _load(one, saved)

    @property
    def _is_combined(self) -> bool:
        return isinstance(self._optimizer, CombinedOptimizer)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _with_changes(optimizer: torch.optim.Optimizer, built: list[dict[str, Any]]) -> dict[str, Any]:
    state = optimizer.state_dict()
    if len(state.get("param_groups", ())) != len(built):  # a class with a form of its own
        return state
    groups = []
    for group, before in zip(state["param_groups"], built, strict=True):
        changed = [
            key
            for key, value in group.items()
            if key not in ("lr", "params", *_OWN_OPTIONS)
            and not (key in before and _same(value, before[key]))
        ]
        groups.append({**group, _CHANGED: changed} if changed else group)
    return {**state, "param_groups": groups}


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False  # it may have changed in place
    return type(one) is type(other) and bool(one == other)


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if "param_groups" not in state:  # a class with a form of its own
        rates = [
            {key: group[key] for key in ("lr", *_OWN_OPTIONS) if key in group}
            for group in optimizer.param_groups
        ]
        optimizer.load_state_dict(state)
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group.update(own)
        return
    saved_groups = state["param_groups"]
    # torch restores moments by the order of parameters, which other groups would change.
    saved, ours = (
        [len(group["params"]) for group in groups]
        for groups in (saved_groups, optimizer.param_groups)
    )
    if saved != ours:
        raise ValueError(f"its parameter groups hold {saved} parameters, those of the task {ours}")
    options = [
        {
            key: group[key]
            for key in (*optimizer.defaults, *_OWN_OPTIONS)
            if key in group and key not in before.get(_CHANGED, ())
        }
        for group, before in zip(optimizer.param_groups, saved_groups, strict=True)
    ]
    # `fused` decides on which device torch puts the step count: keep the value of this run.
    groups = [
        {key: value for key, value in group.items() if key != _CHANGED}
        | ({"fused": own["fused"]} if "fused" in own else {})
        for group, own in zip(saved_groups, options, strict=True)
    ]
    made = {parameter: dict(moments) for parameter, moments in optimizer.state.items()}
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    for parameter, moments in made.items():  # loading drops moments that the state lacks
        for key, value in moments.items():
            optimizer.state[parameter].setdefault(key, value)
    _match_layouts(optimizer)


def _match_layouts(optimizer: torch.optim.Optimizer) -> None:
    # Fused kernels ignore shapes and strides, and a resumed run may change `channels_last`.
    fused = optimizer.defaults.get("fused")
    for parameter, moments in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(moments, dict):
            continue
        for key, value in moments.items():
            if key == "step" or not isinstance(value, Tensor):
                continue
            if fused and value.shape != parameter.shape:
                raise ValueError(
                    f"its {key} belongs to a parameter of shape {list(value.shape)}, but the "
                    f"task's parameter has shape {list(parameter.shape)}"
                )
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                moments[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
