"""Check `repeats` against the rest of a spec. What must not live here: the section (`repeats`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sweeps.errors import Issue
from sweeps.stopping.registry import rule_class


def repeats_faults(data: Mapping[str, Any]) -> Iterator[Issue]:
    """Yield why several seeds of each configuration do not fit the rest of a spec."""
    repeats, stopping = data.get("repeats"), data.get("early_stopping")
    seeds = repeats.get("seeds") if isinstance(repeats, dict) else repeats
    if not isinstance(seeds, int) or seeds < 2:
        return
    scheduler = stopping.get("scheduler") if isinstance(stopping, dict) else None
    if rule_class(scheduler).is_population:
        yield Issue(
            ("repeats",),
            f"the members of a population ({scheduler}) copy checkpoints from each other, and "
            f"{seeds} seeds of one member would be {seeds} members; leave repeats out, or write "
            "another scheduler",
        )
    trials = data.get("trials")
    if not data.get("space") and isinstance(trials, int) and trials > 1:
        yield Issue(
            ("repeats",),
            f"the space is empty, and all {trials} trials would be the same configuration with "
            f"the same {seeds} seeds; write trials: 1, or leave repeats out: trials without a "
            "space differ in their seeds",
        )
