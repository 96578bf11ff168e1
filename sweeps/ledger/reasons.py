"""The reasons with which trials end: requests, kinds of failures, and how long the texts may be.

What must not live here: stopping trials (`run`), and what a driver does after a failure
(`reconcile.failure_policy`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

BY_THE_SWEEP = "stopped with the sweep: "
"""The beginning of a trial's reason if the trial was pruned because its sweep stopped."""
BY_THE_USER = "stopped by the user"
"""The reason in the ledger of a trial that the user stopped."""
BY_ANOTHER_REQUEST = "ended by another request"
"""The start of the reason of an extra trial that a later request does not need."""


def is_by_request(reason: str | None) -> bool:
    """Return whether a trial with this reason was stopped whatever its values were."""
    return (reason or "").startswith((BY_THE_SWEEP, BY_THE_USER, BY_ANOTHER_REQUEST))


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


LONGEST_REASON = 5_000
LONGEST_TRACEBACK = 20_000
"""Both limits are in characters."""


def clipped_reason(text: str) -> str:
    """Return a reason's first `LONGEST_REASON` characters."""
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def clipped_traceback(text: str) -> str:
    """Return a traceback's last `LONGEST_TRACEBACK` characters: the exception is at the end."""
    return text if len(text) <= LONGEST_TRACEBACK else "…" + text[1 - LONGEST_TRACEBACK :]


_CLIPPED = {"reason": clipped_reason, "traceback": clipped_traceback}


def clipped(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's attributes with its reason and traceback clipped."""
    return {
        key: _CLIPPED[key](value) if key in _CLIPPED and isinstance(value, str) else value
        for key, value in attributes.items()
    }
