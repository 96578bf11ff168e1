"""Compare the metrics of two runs of one configuration, bit for bit.

What must not live here: what to do about a difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from trainable.metrics_file import Row


class Difference(NamedTuple):
    """The first value in which two runs differ; None stands for a metric that a run lacks."""

    step: int
    metric: str
    first: float | None
    second: float | None


def first_difference(first: Sequence[Row], second: Sequence[Row]) -> Difference | None:
    """Return the first difference of two runs, as far as both have trained; None without one."""
    from trainable.diagnostics import MEASURED  # which imports torch

    end = min(rows[-1].step if rows else -1 for rows in (first, second))
    one, other = ({row.step: row.metrics for row in rows} for rows in (first, second))
    for step in sorted({*one, *other}):
        if step > end:
            break
        was, now = one.get(step, {}), other.get(step, {})
        for metric in sorted({*was, *now}):
            found = was.get(metric), now.get(metric)
            if metric not in MEASURED and not _same(*found):
                return Difference(step, metric, *found)
    return None


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
