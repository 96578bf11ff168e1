"""How a run calls what the user writes, in one table, and whether it can be called so.

What must not live here: what a method returns (`forms.py`), and when it is called (`loop.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

TASK_CALLS: dict[str, tuple[str, ...]] = {
    "build_data": (),
    "build_model": (),
    "fingerprint": ("data",),
    "param_groups": ("model",),
    "sharded_modules": ("model",),
    "build_optimizer": ("model", "config"),
    "on_epoch_start": ("epoch",),
    "loss": ("model", "batch"),
    "on_step_end": ("step",),
    "on_epoch_end": ("epoch",),
    "evaluate": ("model", "batches"),
    "state_dict": (),
    "load_state_dict": ("state",),
}
"""Each method of a task that a run calls, and what it is given, by position."""
HOOKS = ("on_epoch_start", "on_step_end", "on_epoch_end")
DATA_CALLS = {"collate": ("samples",), "collate_val": ("samples",), "test": ()}
"""The same of the functions in `Data`."""
LOOP_CALL = ("config", "context")
"""What a custom loop is given."""

_SHORT = {"cfg": "config", "conf": "config", "ctx": "context"}
_COUNTS = ("no argument", "one argument", "two arguments")


def call_problem(
    function: Callable[..., Any], given: Sequence[str], other: Collection[str] = ()
) -> str | None:
    """Return why a function cannot be called with arguments of these names; None if it can."""
    try:
        taken = inspect.signature(function).bind(*given).arguments
    except ValueError:
        if not inspect.ismethod(function):  # a builtin without a signature
            return None
        return "cannot be called on a task, since it takes no self"
    except TypeError as problem:
        return f"cannot be called with {_COUNTS[len(given)]} ({problem})"
    for name, argument in taken.items():
        if _SHORT.get(name, name) in {*given, *other} - {argument}:
            return f"takes {', '.join(taken)}, and {name} would be the {argument}"
    return None


def loop_problem(function: Callable[..., Any]) -> str | None:
    """Return why a function cannot be a custom loop; None if it can."""
    of_tasks = {name for given in TASK_CALLS.values() for name in given}
    return call_problem(function, LOOP_CALL, of_tasks)
