"""Find the class of an optimizer by its name, and check the options that it gets.

What must not live here: building one (`optim.py`), and whether its state can be restored
(`optimizer_check.py`).
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
OWN_LOOP = (
    "write a loop of your own, as docs/guides/own-loop.md and sweeps/examples/plain_loop.py show"
)
"""The remedy for an optimizer that a step cannot use."""


def class_of(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer.

    Importing torch's optimizers is cheap; building the first one of a process takes seconds.

    Raises:
        ConfigError: There is no such class here, or a step cannot use it.
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
    """Return why a step cannot use a class whose `step` needs a closure; None if it can."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is None or closure.default is not closure.empty:
        return None
    return (
        f"{kind.__name__}.step() needs a closure, which computes the loss again; a step here "
        f"computes it once, from all micro-batches; take another optimizer, or {OWN_LOOP}"
    )


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

    Raises:
        ConfigError: The class has no such argument, its default is of another type, or the
            learning rate of a user's class is not given.
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
