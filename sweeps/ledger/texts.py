"""How much of a trial's texts a ledger keeps, and how much of them is read from any.

An earlier release, or another program, may have written more. What must not live here: what the
texts mean, and where they are kept (`ledger`, `view`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LONGEST_REASON = 5_000
LONGEST_TRACEBACK = 20_000
"""Characters."""


def clipped_reason(text: str) -> str:
    """Return a reason's beginning."""
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def clipped_traceback(text: str) -> str:
    """Return a traceback's end, where stands what was raised."""
    return text if len(text) <= LONGEST_TRACEBACK else "…" + text[1 - LONGEST_TRACEBACK :]


_CLIPPED = {"reason": clipped_reason, "traceback": clipped_traceback}


def clipped(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's attributes with no longer texts than these."""
    return {
        key: _CLIPPED[key](value) if key in _CLIPPED and isinstance(value, str) else value
        for key, value in attributes.items()
    }
