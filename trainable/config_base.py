"""What the sections of a configuration are made of: their base class, and kinds of fields.

What must not live here: any section (`config.py`, `optimizer_config.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer


class Section(BaseModel):
    """Base class of all sections: frozen, with strict types; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def _plain_number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


Number = Annotated[float, PlainSerializer(_plain_number)]
"""A float that is serialised without '.0' when it is whole."""


class Interval(BaseModel):
    """An interval such as `1 epoch`, `1 report`, `100 steps` or `30 seconds`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int
    unit: Literal["epoch", "report", "step", "second"]

    def __str__(self) -> str:
        return f"{self.count} {self.unit}{'s' if self.count != 1 else ''}"


_INTERVAL = re.compile(r"\s*(\d+)\s*(epoch|report|step|second)s?\s*")


def _parse_interval(value: object) -> object:
    if isinstance(value, Interval):
        return value
    match = _INTERVAL.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) == 0:
        raise ValueError(
            "an interval is a positive count and a unit, such as '1 epoch', '100 steps' or '30 "
            "seconds'"
        )
    return Interval(count=int(match[1]), unit=match[2])


Every = Annotated[Interval, BeforeValidator(_parse_interval), PlainSerializer(str)]


def fraction_or_count(value: float | None) -> float | None:
    """Check a value that is a fraction of all steps in [0, 1), or a whole number of steps."""
    if value is not None and (value < 0 or (isinstance(value, float) and value >= 1)):
        raise ValueError(
            f"{value} is neither a fraction of all steps in [0, 1) nor a whole number of steps; "
            "write 0.1 for a tenth of the run or 100 for a hundred steps"
        )
    return value


def equal_to(value: object) -> Callable[[object], bool]:
    """Return an `exclude_if` that leaves a key out of a written configuration at this value."""
    return lambda found: found == value
