"""What is told of an exception that a user's code raised: of bounded length, without secrets and
control characters.

What must not live here: what it means for the trial (`ray_adapter`).
"""

from __future__ import annotations

import traceback

from redaction.escapes import printable, visible
from redaction.secrets import redact, redact_clipped

LONGEST_REASON = 4_000
"""Characters; of what follows nothing is read."""
_LONGEST_LINE = 2_000
_FIRST_LINES, _LAST_LINES = 50, 150


def reason_of(error: BaseException, kind: str) -> str:
    """Return in one line, whatever the exception's text holds, why a trial failed.

    Args:
        kind: What its end is called; `error` for what the user's code raised.
    """
    try:
        text = str(error)
    except Exception as problem:  # of the user's own `__str__`: this is about the first error
        text = f"its text cannot be told: {type(problem).__name__}"
    name = type(error).__name__ if kind == "error" else kind
    return printable(redact_clipped(f"{name}: {text}".removesuffix(": "), LONGEST_REASON))


def traceback_of(error: BaseException) -> str:
    """Return its traceback and those of its causes: the first lines and the last ones, each with
    its beginning.
    """
    lines = "".join(traceback.format_exception(error)).split("\n")
    left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    if left_out > 0:
        lines[_FIRST_LINES:-_LAST_LINES] = [f"[{left_out} lines are left out here]"]
    text = "\n".join(redact_clipped(line, _LONGEST_LINE) for line in lines)
    return visible(redact(text))  # again: a private key has several lines
