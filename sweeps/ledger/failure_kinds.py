"""The kinds of failures with which the reasons of failed trials begin.

What must not live here: what a driver does after a failure (`reconcile.failure_policy`).
"""

from __future__ import annotations

from collections.abc import Collection

# A trial's parameters decide whether its loss diverges and its memory suffices. Such failures are
# results of the search and no reason to end it.
PARAMETER_FAILURES = {"non_finite", "oom"}
"""Kinds of failures of which the parameters are the probable cause."""

_KINDS = {"config", "task", "non_finite", "oom", "checkpoint", "lost", "limit", "hang"}
_PERHAPS = {*PARAMETER_FAILURES, "config", "error", "hang"}


def kind_of(reason: str) -> str:
    """Return the kind of failure that a reason begins with; `error`: the task's code raised it."""
    kind = reason.partition(":")[0]
    return kind if kind in _KINDS else "error"


def is_of_parameters(reason: str, searched: Collection[str]) -> bool:
    """Return whether a trial failed because of its parameters, so that another one may succeed.

    A loss that diverges and memory that does not suffice are such failures, and so is a refused
    value of a key that is searched. All trials have the other keys in common.
    """
    kind, _, message = reason.partition(": ")
    return kind in PARAMETER_FAILURES or (
        kind == "config" and message.partition(": ")[0] in searched
    )


def may_be_of_parameters(reason: str | None) -> bool:
    """Return whether a failed trial may have failed because of its parameters.

    A lost worker, a limit of a process, a checkpoint that cannot be read, and a task that cannot
    be loaded say nothing of the parameters.
    """
    return reason is not None and kind_of(reason) in _PERHAPS
