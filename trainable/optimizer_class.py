"""Find the class of an optimizer by its name, and check the options that it gets.

What must not live here: building one (`optim.py`), and whether its state can be restored
(`rehearsal.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from trainable.errors import ConfigError
from trainable.optimizer_config import OPTIMIZER_DEFAULTS, OptimizerConfig, is_own
from trainable.own_names import import_own
from trainable.task_registry import nearest

_PACKAGE = "pytorch_optimizer"
_FROM_PACKAGE = {"lamb": "Lamb", "lion": "Lion"}
_NAME = "train.optimizer.name"
_OF_TORCH = (
    *("param_groups", "state", "defaults"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
"""What the constructor of torch.optim.Optimizer sets and a run uses."""
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
OWN_LOOP = (
    "write a loop of your own, as docs/guides/own-loop.md and sweeps/examples/plain_loop.py show"
)
"""The remedy for an optimizer that a step cannot use."""


def class_of(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer.

    Importing torch's optimizers is cheap; building the first one of a process takes seconds.
    """
    name = config.name
    if name in _FROM_PACKAGE:
        if importlib.util.find_spec(_PACKAGE) is None:
            raise ConfigError(
                f"{name!r} is not part of torch; it needs an extra; pip install "
                "'gradsweep[optimizers]'",
                key=_NAME,
            )
        return getattr(importlib.import_module(_PACKAGE), _FROM_PACKAGE[name])  # type: ignore[no-any-return]
    found = import_own(name, _NAME) if is_own(name) else _of_torch(name)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise ConfigError(
            f"{name!r} is {_described(found)}; an optimizer is a class that derives from "
            "torch.optim.Optimizer; name one, or build it in Task.build_optimizer(model, config)",
            key=_NAME,
        )
    if (why := closure_problem(found)) is not None:
        raise ConfigError(f"{name!r}: {why}", key=_NAME)
    return found


def _of_torch(name: str) -> Any:
    by_name = {key.lower(): value for key, value in vars(torch.optim).items() if key[0].isupper()}
    if name not in by_name:
        raise ConfigError(
            f"{name!r} is not in torch {torch.__version__}; a newer torch has it; upgrade torch, "
            f"or write one of {', '.join(key for key in OPTIMIZER_DEFAULTS if key in by_name)}",
            key=_NAME,
        )
    return by_name[name]


def _described(found: object) -> str:
    kind = found.__name__ if isinstance(found, type) else type(found).__name__
    return f"the class {kind}" if isinstance(found, type) else f"an object of type {kind}"


def closure_problem(kind: type[torch.optim.Optimizer]) -> str | None:
    """Return why a step cannot call a class' `step`, which needs arguments; None if it can."""
    _, *further = inspect.signature(kind.step).parameters.values()
    needed = [p.name for p in further if p.default is p.empty and p.kind not in _ANY_NUMBER]
    if not needed:
        return None
    if needed != ["closure"]:
        return (
            f"{kind.__name__}.step() needs {', '.join(needed)}; a step is one call without "
            f"arguments, after the gradients are computed and clipped; give them defaults, or "
            f"{OWN_LOOP}"
        )
    return (
        f"{kind.__name__}.step() needs a closure, which computes the loss again; a step here "
        f"computes it once, from all micro-batches; take another optimizer, or {OWN_LOOP}"
    )


def unusable(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why a run cannot use an optimizer, such as a wrapper of another; None if it can."""
    kind = type(optimizer)
    name = kind.__name__
    lacking = ", ".join(key for key in _OF_TORCH if not hasattr(optimizer, key))
    if lacking or not getattr(kind.step, "hooked", False):
        found = f"{name} lacks {lacking}" if lacking else f"{name}.step() calls no hooks"
        is_property = isinstance(getattr(kind, "param_groups", None), property)
        own = "remove the property param_groups, and " if is_property else ""
        return (
            f"{found}: its __init__() never called that of torch.optim.Optimizer, whose parts a "
            "run uses to save, schedule and order its steps; "
            f"{own}write `super().__init__(base.param_groups, base.defaults)` at the beginning of "
            f"{name}.__init__(), where `base` is the optimizer that it wraps, and then "
            "`self.param_groups, self.state = base.param_groups, base.state`, which a "
            "load_state_dict() of its own repeats after `base.load_state_dict(state)`, or "
            f"{OWN_LOOP}"
        )
    try:
        inspect.signature(optimizer.zero_grad).bind(set_to_none=True)
    except TypeError as problem:
        return (
            f"{name}.zero_grad() cannot be called with set_to_none=True ({problem}); each step "
            f"begins with that call; write `def zero_grad(self, set_to_none=True):` in {name}"
        )
    if (why := closure_problem(kind)) is not None:
        return why
    for group in optimizer.param_groups:
        if not isinstance(rate := group.get("lr"), float | int | torch.Tensor):
            return (
                f"{name} has a parameter group whose lr is {rate!r}; the schedule scales the "
                "learning rate of each group; build it with lr=config.optimizer.lr, and switch "
                "off a schedule of its own"
            )
    return None


def torch_options(config: OptimizerConfig, kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the options of the configuration that an optimizer of torch takes."""
    known = inspect.signature(kind).parameters
    given = config.model_dump(include={"lr", "weight_decay", "momentum", "betas", "eps"})
    return {key: value for key, value in given.items() if key in known and value is not None}


def checked_options(
    config: OptimizerConfig, kind: type[torch.optim.Optimizer], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Check options by the names and default values in a class's signature; return them.

    A list becomes a tuple where the default is one.
    """
    known = inspect.signature(kind).parameters
    named = [p.name for p in known.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = named[1:]  # the first one takes the parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if is_own(config.name) and "lr" not in config.model_fields_set:
        default = known["lr"].default if "lr" in known else inspect.Parameter.empty
        own = "" if default is inspect.Parameter.empty else f" (the class has {default!r})"
        raise ConfigError(
            f"{config.name!r} is built without lr{own}; the schedule scales the learning rate of "
            f"the spec; add lr to train.optimizer, or search train.optimizer.lr",
            key="train.optimizer",
        )
    checked = {}
    for key, value in options.items():
        place = f"train.optimizer.{'arguments.' if key in config.arguments else ''}{key}"
        if key not in names and not takes_any:
            raise ConfigError(
                f"{config.name!r} takes no argument {key!r}{nearest(key, names)}; it takes: "
                f"{', '.join(names)}; correct or remove it",
                key=place,
            )
        checked[key] = _checked(value, known.get(key), place)
    return checked


def _checked(value: Any, parameter: inspect.Parameter | None, place: str) -> Any:
    default = parameter.default if parameter is not None else None
    if default is inspect.Parameter.empty or default is None or value is None:
        return value
    if isinstance(default, bool):
        fits, rule = isinstance(value, bool), "true or false"
    elif isinstance(default, int | float):
        fits, rule = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(default)
        rule = f"a list of {len(default)} values"
        value = tuple(value) if fits else value
    elif isinstance(default, str):
        fits, rule = isinstance(value, str), "text"
    else:
        return value
    if fits:
        return value
    raise ConfigError(
        f"{value!r} has the wrong type; the default is {default!r}, so it takes {rule}; correct "
        "it, or leave it out",
        key=place,
    )
