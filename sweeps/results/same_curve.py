"""Compare the metrics of two runs of one configuration, bit for bit.

What must not live here: what to do about a difference.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from trainable.metrics_file import Row


class Difference(NamedTuple):
    """The first value in which two runs differ; None stands for a metric that a run lacks."""

    step: int
    metric: str
    first: float | None
    second: float | None


def first_difference(
    first: Sequence[Row], second: Sequence[Row], *, ignored: Collection[str] = ()
) -> Difference | None:
    """Return the first difference of two runs, as far as both have trained; None without one.

    Args:
        first: The rows of a run.
        second: Those of another one.
        ignored: Metrics that are not compared, besides times and memory.
    """
    from trainable.diagnostics import MEASURED  # which imports torch

    end = min(rows[-1].step if rows else -1 for rows in (first, second))
    one, other = ({row.step: row.metrics for row in rows} for rows in (first, second))
    for step in sorted({*one, *other}):
        if step > end:
            break
        was, now = one.get(step, {}), other.get(step, {})
        for metric in sorted({*was, *now}):
            found = was.get(metric), now.get(metric)
            if metric not in MEASURED and metric not in ignored and not _same(*found):
                return Difference(step, metric, *found)
    return None


def first_logged_difference(
    first: Sequence[tuple[int, Row]], second: Sequence[tuple[int, Row]], *, until: int
) -> Difference | None:
    """Return the first difference of what the user's code logged under its own steps.

    Args:
        first: For each row of a run, the run's step at that time, and the row.
        second: The same of another run.
        until: The last step of the run that is compared.
    """
    one, other = ([row for row in rows if row[0] <= until] for rows in (first, second))
    for index in range(max(len(one), len(other))):
        (at, was), (then, now) = (
            rows[index] if index < len(rows) else (0, Row(0, 0, {})) for rows in (one, other)
        )
        for metric in sorted({*was.metrics, *now.metrics}):
            found = was.metrics.get(metric), now.metrics.get(metric)
            if was.step != now.step or not _same(*found):
                return Difference(max(at, then), metric, *found)
    return None


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
