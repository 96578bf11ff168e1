"""One card of the audit: a question, its answer with numbers, and what to do.

What must not live here: the questions themselves (a module each), and printing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "warn", "not enough data", "does not apply"]
"""A card without enough data says what it needs; one that cannot apply to a sweep says why."""
RUN_MORE = "run more trials"
SAME_VALUES = "see whether the model learns, and whether the metric can show it"


@dataclass(frozen=True)
class Card:
    """What the audit found about one question."""

    id: str
    """The card's name, such as `bounds`."""
    question: str
    verdict: Verdict
    evidence: str
    """What supports the verdict, in a sentence that says from how many trials it is."""
    figure: Mapping[str, Any] = field(default_factory=dict)
    """The numbers, ready for JSON."""
    remedy: str | None = None
    """What to do; None if nothing is to be done."""
    command: Sequence[str] | None = None
    """The arguments of a `sweep` command on the sweep that does it, without the sweep's name: the
    first is the command itself. None if there is no such command."""
