"""The length of a task's run: what `Task.total_steps` returns.

It is kept beside the task, not in it: a checkpoint does not hold it, so a run that resumes with a
longer budget has the longer one. What must not live here: how long a run is (`report_plan.py`).
"""

from __future__ import annotations

import weakref
from typing import overload

_STEPS: dict[int, tuple[weakref.ref[object], int]] = {}
"""By the task's id, the task and the steps of its run."""


class TotalSteps:
    """The attribute `total_steps` of tasks: the steps of the run, None before they are known.

    Not a property: a task that sets an attribute of this name itself has its own.
    """

    @overload
    def __get__(self, task: None, owner: type) -> TotalSteps: ...

    @overload
    def __get__(self, task: object, owner: type) -> int | None: ...

    def __get__(self, task: object | None, owner: type) -> TotalSteps | int | None:
        if task is None:
            return self
        known = _STEPS.get(id(task))
        return known[1] if known is not None and known[0]() is task else None


def set_total_steps(task: object, steps: int) -> None:
    """Let a task know how many steps its run takes."""
    key = id(task)
    _STEPS[key] = weakref.ref(task, lambda _: _STEPS.pop(key, None)), steps
