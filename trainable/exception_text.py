"""Describe an exception of the user's code: bounded, without secrets or control characters.

What must not live here: what it means for the trial (`ray_adapter.py`).
"""

from __future__ import annotations

import traceback

from redaction.escapes import printable, visible
from redaction.secrets import redact, redact_clipped
from trainable.errors import TrainingError

LONGEST_REASON = 4_000
"""The most characters of an exception's text that are read."""
_LONGEST_LINE = 2_000
_FIRST_LINES, _LAST_LINES = 50, 150


def reason_of(error: BaseException, kind: str) -> str:
    """Return in one line why a trial failed, for any text of the exception.

    Args:
        kind: The kind of the failure; `error` for an exception of the user's code.
    """
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
