"""Describe an exception of the user's code: bounded, without secrets or control characters.

What must not live here: what it means for the trial (`ray_adapter.py`).
"""

from __future__ import annotations

import socket
import traceback
from typing import Any

from redaction.escapes import printable, visible
from redaction.secrets import redact, redact_clipped
from trainable.errors import OutOfMemory, StorageError, TrainingError
from trainable.memory import is_out_of_memory

LONGEST_REASON = 4_000
"""The most characters of an exception's text that are read."""
_LONGEST_LINE = 2_000
_FIRST_LINES, _LAST_LINES = 50, 150


def reason_of(error: BaseException, kind: str) -> str:
    """Return in one line why a trial failed, for any text of the exception."""
    try:
        text = str(error)
    except Exception as problem:  # from the user's own `__str__`
        text = f"its text cannot be shown: {type(problem).__name__}"
    name = type(error).__name__ if kind == "error" else kind
    return printable(redact_clipped(f"{name}: {text}".removesuffix(": "), LONGEST_REASON))


def place_of(error: BaseException) -> str:
    """Return the file and the line that raised an exception, on whichever rank that was."""
    there: str | None = getattr(error, "place", None) if isinstance(error, TrainingError) else None
    where = traceback.extract_tb(error.__traceback__)
    return there or (f"{where[-1].filename}:{where[-1].lineno}" if where else "")


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception and its causes: the first and last lines, shortened."""
    lines = "".join(traceback.format_exception(error)).split("\n")
    left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    if left_out > 0:
        lines[_FIRST_LINES:-_LAST_LINES] = [f"[{left_out} lines are left out here]"]
    text = "\n".join(redact_clipped(line, _LONGEST_LINE) for line in lines)
    return visible(redact(text))  # redact the whole text, too: a private key has several lines


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return `kind`, `reason`, `traceback` and `place` of a failure.

    Of a storage error also `errno`, `system` (the operating system's message) and `host`, which
    the driver needs to tell a limit of this process from a failed storage.
    """
    if isinstance(error, TrainingError):
        kind = error.kind
    else:
        kind = OutOfMemory.kind if is_out_of_memory(error) else "error"
    failure: dict[str, Any] = {
        "kind": kind,
        "reason": reason_of(error, kind),
        "traceback": traceback_of(error),
        "place": place_of(error),
    }
    problem = error.__cause__
    if isinstance(error, StorageError) and isinstance(problem, OSError):
        failure |= {"errno": problem.errno, "system": redact(str(problem))}
        failure["host"] = getattr(problem, "host", socket.gethostname())  # of the rank that failed
    return failure
