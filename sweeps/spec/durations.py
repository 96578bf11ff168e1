"""Parse durations such as `30s` or `1m30s`."""

from __future__ import annotations

import re

from sweeps.errors import WrongDuration
from sweeps.formatting import quoted

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
