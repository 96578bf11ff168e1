"""What a stopping rule compares: the value of one metric, or the values of several.

What must not live here: comparing trials (`dominance`, and the modules of the rules).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Value = float | tuple[float, ...]
"""What a report brings: the metric, or with several metrics the value of each."""
Minimize = bool | tuple[bool, ...]
"""Whether less is better; with several metrics, for each of them."""


def all_values(value: Value) -> tuple[float, ...]:
    """Return the value of each metric."""
    return value if isinstance(value, tuple) else (value,)


def first_value(value: Value) -> float:
    """Return the value of the (first) metric."""
    return value[0] if isinstance(value, tuple) else value


def first_minimize(minimize: Minimize) -> bool:
    """Return whether less of the (first) metric is better."""
    return minimize[0] if isinstance(minimize, tuple) else minimize


def as_value(values: Sequence[float]) -> Value:
    """Return the values of a report in the form that rules receive."""
    return values[0] if len(values) == 1 else tuple(values)


def is_finite(value: Value) -> bool:
    """Return whether the values of all metrics are finite."""
    return all(map(math.isfinite, all_values(value)))


def losses(value: Value, minimize: Minimize) -> tuple[float, ...]:
    """Return the values with the sign that makes less better, for each metric."""
    lows = minimize if isinstance(minimize, tuple) else (minimize,)
    return tuple(one if low else -one for one, low in zip(all_values(value), lows, strict=True))
