"""Check the function of a custom loop before it runs: what it takes, and that it yields.

What must not live here: how it is found (`find_task.py`), and what it yields (`custom_loop.py`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainable.config import TrialConfig
from trainable.errors import ConfigError


def check_loop(config: TrialConfig, function: Callable[..., Any]) -> None:
    """Refuse a function that is no loop, and what only a task can have."""
    if config.checkpoint.parameters != "all":
        raise ConfigError(
            f"{config.checkpoint.parameters}, and {config.task.name} is a custom loop, whose "
            "checkpoints have what it yields; yield only the trained parameters and write all",
            key="checkpoint.parameters",
        )
    if problem := _argument_problem(config, function) or _yield_problem(function):
        raise ConfigError(f"{config.task.name!r} is a function that {problem}", key="task.name")


def _argument_problem(config: TrialConfig, function: Callable[..., Any]) -> str | None:
    """Return why a function cannot take a configuration and a context; None if it can."""
    values = _values(config)
    try:
        names = _taken(function)
        found = f"takes {', '.join(names)}"
    except TypeError as problem:
        names = list(inspect.signature(function).parameters)
        found = f"cannot be called with two arguments ({problem})"
    else:
        if not any(name in values for name in names):
            return None
    reads = [f" and `{name} = {values[name]}`" for name in names if name in values]
    return (
        f"{found}; a loop is a generator function that receives the trial's configuration and a "
        f"context, and reads its values from them; write `{_head(function)}`{''.join(reads)}, or "
        "name a class that derives from trainable.Task"
    )


def _taken(function: Callable[..., Any]) -> list[str]:
    """Return the names under which a function takes two arguments."""
    try:
        return list(inspect.signature(function).bind(None, None).arguments)
    except ValueError:  # a builtin without a signature
        return []


def _head(function: Callable[..., Any]) -> str:
    return f"def {getattr(function, '__name__', 'run')}(config, context):"


def _values(config: TrialConfig) -> dict[str, str]:
    """Return where a loop reads the values that a function might take, by name."""
    found = dict(_leaves("config.train", config.train.model_dump(exclude={"ema", "swa"})))
    found |= {"epochs": "context.epochs", "device": "context.device", "seed": "context.seed"}
    return found | {key: f"config.task.{key}" for key in config.task.arguments}


def _leaves(path: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each value and its path; of equal names the outermost comes last."""
    for key, value in values.items():
        if isinstance(value, dict) and key != "arguments":
            yield from _leaves(f"{path}.{key}", value)
    for key in values:
        yield key, f"{path}.{key}"


def _yield_problem(function: Callable[..., Any]) -> str | None:
    """Return why a function makes no reports; None if it does, or may."""
    plain = inspect.unwrap(function)
    if not inspect.isroutine(plain) or inspect.isgeneratorfunction(plain):
        return None  # an object is called, and what it returns is looked at then
    rule = "a loop is a generator function, which yields a report after each epoch"
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        return f"is asynchronous; {rule}; write `{_head(plain)}`, without async and await"
    if _hands_on_context(plain):
        return None
    return (
        f"returns and never yields; {rule}; write `for epoch in context.remaining_epochs():` and "
        'in it, instead of return, `yield {"val/loss": loss}, {"model": model.state_dict(), '
        '"optimizer": optimizer.state_dict()}`; see docs/guides/own-loop.md'
    )


def _hands_on_context(function: Callable[..., Any]) -> bool:
    """Whether a function gives its context to another one, which may yield; true if unknown."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, or a lambda in the midst of a line
        return True
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    *_, context = _taken(function)  # the second one, or what takes any number of them
    return any(
        isinstance(node, ast.Name) and node.id == context and id(node) not in owners
        for node in ast.walk(tree)
    )
