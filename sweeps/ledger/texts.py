"""Limit the length of a trial's reason and traceback, when written and when read.

Another program may have written longer texts. What must not live here: what the texts mean, and
where they are stored (`ledger`, `reader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
