"""Numbers, durations and sizes as people read them.

What must not live here: tables and sentences (`commands`), and reading a spec (`config`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from redaction.escapes import printable

_LONGEST_CELL = 500
"""Characters."""


def format_number(value: Any) -> str:
    """A number for people: four significant digits; a text in one line."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(str(value))
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.4g}"


def format_value(value: Any) -> str:
    """A parameter's value for people: as a spec has it, and a number as above."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return format_number(value)


def format_parameter(params: Mapping[str, Any], key: str) -> str:
    """The value of one parameter; a dash where there is no such parameter."""
    return format_value(params[key]) if key in params else "-"


def joined(params: Mapping[str, Any]) -> str:
    """Parameters, or metrics, in one line."""
    return ", ".join(f"{key} {format_value(value)}" for key, value in params.items())


def format_best(metrics: Sequence[str], result: float | Sequence[float]) -> str:
    """What a trial came to, for people: `best val/loss 0.1234`; of several metrics each value by
    its name, since only the first is at its best.
    """
    if not isinstance(result, Sequence):
        return f"best {metrics[0]} {format_number(result)}"
    named = zip(metrics, result, strict=True)
    return ", ".join(f"{metric} {format_number(value)}" for metric, value in named)


def format_cells(result: Any, metrics: Sequence[str]) -> list[str]:
    """Return one cell for each metric of a sweep; dashes before the first report."""
    values = result if isinstance(result, list | tuple) else [result] * len(metrics)
    return [format_number(value) for value in values]


def format_result(metrics: Sequence[str], result: Any) -> str:
    """The same, without the name where there is one metric alone."""
    return format_best(metrics, result) if isinstance(result, list) else format_number(result)


def format_reason(reason: str) -> str:
    """A reason as one cell of a table of many trials: its beginning, where it is long."""
    return reason if len(reason) <= _LONGEST_CELL else reason[: _LONGEST_CELL - 1] + "…"


def format_duration(seconds: float) -> str:
    """A duration for people: `7s`, `2m05s`, `1h03m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_bytes(count: float) -> str:
    """An amount of memory for people: `512 B`, `48.3 KiB`, `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
