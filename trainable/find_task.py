"""Find a task or a loop by its name, and construct it.

What must not live here: what a task is (`task.py`), and the built-in names
(`user_code/task_import.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trainable.errors import ConfigError
from trainable.task import Task, describe_kind
from trainable.user_code.task_import import import_module, nearest, resolve_task_name


def load_task(name: str, arguments: Mapping[str, Any]) -> Task:
    """Find a task by name and construct it.

    Args:
        name: A built-in task's name, or `package.module:ClassName`; the module must be importable.
        arguments: Keyword arguments for its constructor.

    Raises:
        ConfigError: The module or the name in it was not found, the object is not a task, or an
            argument is unknown.
    """
    kind = _find(name)
    _check_arguments(name, kind, arguments)
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            f"{name!r} refused its arguments {dict(arguments)}: {problem}", key="task"
        ) from problem


def default_arguments(name: str) -> dict[str, Any]:
    """Return the default arguments of a task's constructor that a spec can hold: single values."""
    parameters = _parameters(_find(name))
    found = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {k: v for k, v in found.items() if isinstance(v, bool | int | float | str | None)}


def import_named(name: str) -> None:
    """Import the module of a task or a loop."""
    import_module(name, resolve_task_name(name)[0], "task.name")


def load_loop(name: str) -> Callable[..., Any] | None:
    """Return the function that `package.module:function` names; None when it names a class."""
    found, _ = _locate(name)
    if isinstance(found, type) or not callable(found):
        return None
    function: Callable[..., Any] = found
    return function


def _locate(name: str) -> tuple[Any, list[str]]:
    """Import the object of that name; return it and the names of all tasks in its module."""
    module_name, class_name = resolve_task_name(name)
    module = import_module(name, module_name, "task.name")
    found = getattr(module, class_name, None)
    tasks = [key for key, value in vars(module).items() if _is_task(value) and value is not Task]
    if found is None:
        raise ConfigError(
            f"{name!r}: the module {module_name!r} was imported, but it has no {class_name!r}"
            f"{nearest(class_name, tasks)}; its tasks are: {', '.join(tasks) or 'none'}; name one "
            "that is there",
            key="task.name",
        )
    return found, tasks


def _find(name: str) -> type[Task]:
    kind, tasks = _locate(name)
    if not _is_task(kind):
        raise ConfigError(
            f"{name!r} is {describe_kind(kind)}; it must be a class that derives from "
            "trainable.Task and defines build_model() and build_data(), or a generator function "
            f"run(config, context); tasks beside it: {', '.join(tasks) or 'none'}; name one",
            key="task.name",
        )
    assert isinstance(kind, type)
    return kind


def _is_task(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Task)


def _check_arguments(name: str, kind: type[Task], arguments: Mapping[str, Any]) -> None:
    parameters = _parameters(kind)
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_any else [key for key in arguments if key not in known]
    if unknown:
        listed = ", ".join(f"{key!r}{nearest(key, known)}" for key in unknown)
        remedy = "correct or remove it"
        if unknown == ["fold", "folds"]:
            remedy = (
                "`repeats.folds` gives both: take them, and hold out part `fold` of `folds`, or "
                "leave repeats.folds out"
            )
        raise ConfigError(
            f"{name!r} takes no argument {listed}; it takes: {', '.join(known) or 'none'}; "
            f"{remedy}",
            key="task" if len(unknown) > 1 else f"task.{unknown[0]}",
        )
    missing = [
        p.name
        for p in parameters
        if p.name in known and p.default is p.empty and p.name not in arguments
    ]
    if missing:
        raise ConfigError(
            f"{name!r} needs the argument {', '.join(map(repr, missing))}; it has no default; "
            "add it below task:",
            key="task",
        )


def _parameters(kind: type[Task]) -> Collection[inspect.Parameter]:
    if kind.__init__ is object.__init__ and kind.__new__ is object.__new__:
        return ()  # to find that out, `inspect` copies `sys.modules`: 10 ms in a fresh fork
    return inspect.signature(kind).parameters.values()
