"""The tables of P9: medians and means with bootstrapped 95 % intervals, and Mann-Whitney's test.

A search that did not get there is counted with all that it was given, which favours it. What must
not live here: measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

"""What a row is known by."""


def _interval(of: Callable[..., Any], values: Sequence[float]) -> tuple[float, float]:
    found = stats.bootstrap((values,), of, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median."""
    return _interval(np.median, values)


def ratio_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of two medians."""

    def ratio(a: Any, b: Any, axis: int) -> Any:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    found = stats.bootstrap((first, second), ratio, method="percentile", rng=0)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def ruled(lines: Sequence[Sequence[str]]) -> str:
    """Return cells as text in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
