"""Format numbers, durations and sizes for people, and parse the durations that they write.

What must not live here: tables and sentences (`cli`), and parsing a spec (`spec`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from redaction.escapes import printable
from redaction.secrets import redact
from sweeps.errors import WrongDuration

_LONGEST_CELL = 500
"""Characters."""


def format_number(value: Any) -> str:
    """Format a number with four significant digits, or a text in one line."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(str(value))
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.4g}"


def format_value(value: Any) -> str:
    """Format a parameter's value as in a spec, but numbers with four significant digits."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return format_number(value)


def format_parameter(params: Mapping[str, Any], key: str) -> str:
    """Format the value of one parameter; a dash if there is no such parameter."""
    return format_value(params[key]) if key in params else "-"


def counted(count: float, thing: str) -> str:
    """Format a number of things: `1 trial`, `1,200 trials`; a fraction is rounded."""
    shown = f"{count:,.0f}"
    return f"{shown} {thing}{'' if shown == '1' else 's'}"


def listed(words: Sequence[str]) -> str:
    """Join words as in a sentence: `a, b and c`."""
    *first, last = words or ("",)
    return f"{', '.join(first)} and {last}" if first else last


def titles(keys: Sequence[str], beside: Sequence[str]) -> list[str]:
    """Shorten dotted keys to their last parts, as far as each title stays unique."""
    parts = dict.fromkeys(keys, 1)

    def title(key: str) -> str:
        return ".".join(key.split(".")[-parts[key] :])

    while True:
        count = Counter([*map(title, keys), *beside])
        alike = [key for key in keys if count[title(key)] > 1 and title(key) != key]
        if not alike:
            return list(map(title, keys))
        for key in alike:
            parts[key] += 1


def joined(params: Mapping[str, Any]) -> str:
    """Format parameters or metrics in one line."""
    return ", ".join(f"{key} {format_value(value)}" for key, value in params.items())


def format_best(
    metrics: Sequence[str], result: float | Sequence[float], *, final: bool = False
) -> str:
    """Format a trial's result: `best val/loss 0.1234`, or `last val/loss 0.1234`.

    Of several metrics none is called best, because only the first is at its best.
    """
    if not isinstance(result, Sequence):
        return f"{'last' if final else 'best'} {metrics[0]} {format_number(result)}"
    named = zip(metrics, result, strict=True)
    return ", ".join(f"{metric} {format_number(value)}" for metric, value in named)


def format_cells(result: Any, metrics: Sequence[str]) -> list[str]:
    """Return one cell for each metric of a sweep; dashes before the first report."""
    values = result if isinstance(result, list | tuple) else [result] * len(metrics)
    return [format_number(value) for value in values]


def format_reason(reason: str) -> str:
    """Shorten a long reason for a table cell."""
    return reason if len(reason) <= _LONGEST_CELL else reason[: _LONGEST_CELL - 1] + "…"


def format_duration(seconds: float | None) -> str:
    """Format a duration: `7s`, `2m 05s`, `1h 03m`; a dash if it is unknown."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def format_device_hours(seconds: float, device: str) -> str:
    """Format device-seconds: `0.0023 CPU-hours`, `12.4 GPU-hours`."""
    hours = seconds / 3600
    return f"{hours:,.1f} {device}-hours" if hours >= 10 else f"{hours:.2g} {device}-hours"


def format_time(time: str) -> str:
    """Format a time in ISO 8601 for people: `2026-11-26 14:03:20`, in its own time zone."""
    return time[:19].replace("T", " ")


def format_bytes(count: float) -> str:
    """Format an amount of memory: `512 B`, `48.3 KiB`, `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


_SHOWN = 60  # characters of a quoted value


def shown(value: object) -> str:
    """Return a value as a spec would contain it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return quoted(value) if isinstance(value, str) else cut(str(value))


def described(value: object) -> str:
    """Return a value as a spec would contain it; of a list or a mapping, that it is one."""
    if isinstance(value, list | dict):
        kind = "list" if isinstance(value, list) else "mapping"
        return f"a {kind}" if value else f"an empty {kind}"
    return shown(value)


def cut(text: str) -> str:
    """Return a text that is short and printable, for a message.

    Secrets are redacted before it is shortened: a shortened one may not be recognized.
    """
    text = printable(redact(text))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def quoted(text: str) -> str:
    """Return a text in quotes for a message."""
    return f"'{cut(text)}'"


_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")


_LONGEST = 365 * 24 * 3600
"""In seconds; the system cannot wait for arbitrarily long times."""


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of `30s`, `2m`, `1m30s`, `1h` or, without a unit, `90`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise WrongDuration(
            f"{option} is {quoted(text)}; a duration is a count of seconds, or counts with units; "
            "write for example 30s, 2m or 1m30s"
        )
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    total = 3600 * hours + 60 * minutes + seconds
    if total > _LONGEST:
        raise WrongDuration(
            f"{option} is {quoted(text)}; a duration is at most a year (8760h); write for "
            "example 30s, 2m or 1m30s"
        )
    return total
