"""Import a user's class or function by its name, `package.module:Name`.

The name of a task is found by `task.py`, which also knows tasks that are built in. What must not
live here: what the object must be, and torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from trainable.errors import ConfigError
from trainable.task_import import no_exit
from trainable.task_registry import nearest
from trainable.user_code import keep_caches_reachable


def import_module(name: str, module_name: str, key: str) -> ModuleType:
    """Import the module of a task, an optimizer or a schedule."""
    keep_caches_reachable()
    try:
        with no_exit(f"{name!r}: the module {module_name!r}, while it was imported,", key):
            return importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as problem:  # a user's module may fail in any way while it is imported
        raise ConfigError(
            f"{name!r}: the module {module_name!r} could not be imported "
            f"({type(problem).__name__}: {problem}); the part before the colon must be importable "
            "from where you start; correct the module or its name",
            key=key,
        ) from problem


def import_own(name: str, key: str) -> Any:
    """Return what `package.module:Name` names."""
    module_name, _, inside = name.partition(":")
    module = import_module(name, module_name, key)
    if not hasattr(module, inside):
        known = [one for one in vars(module) if not one.startswith("_")]
        raise ConfigError(
            f"{name!r}: the module {module_name!r} was imported, but it has no {inside!r}"
            f"{nearest(inside, known)}; name a class or a function that is there",
            key=key,
        )
    return getattr(module, inside)
