"""The median stopping rule, as a pure function of what trials reported.

What must not live here: Ray, and anything that starts or ends a trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean, median

from sweeps.early_stopping.halving import Reports


def stops_at_the_median(
    number: int,
    reports: Reports,
    *,
    grace: int,
    min_trials: int,
    minimize: bool,
) -> bool:
    """Whether a trial is stopped at its last report.

    It is when its best value so far is worse than the median of the others' mean values up to the
    same epoch (Golovin et al., "Google Vizier", 2017, section 3.2.2).

    Args:
        number: The trial, which has reported.
        reports: What all trials have reported by now.
        grace: Epochs that every trial gets, and from which on means are taken.
        min_trials: How many others must have come as far.
    """
    epoch = max(reports[number])
    if epoch < grace:
        return False
    means = [
        mean
        for other, values in reports.items()
        if other != number
        and max(values, default=0) >= epoch
        and math.isfinite(mean := _mean(values, grace, epoch))
    ]
    if len(means) < min_trials:
        return False
    sound = [value for value in reports[number].values() if math.isfinite(value)]
    best: Callable[..., float] = min if minimize else max
    value = best(sound, default=math.inf if minimize else -math.inf)
    middle = median(means)
    return value > middle if minimize else value < middle


def _mean(values: Mapping[int, float], first: int, last: int) -> float:
    scoped = [value for epoch, value in values.items() if first <= epoch <= last]
    return fmean(scoped) if scoped else math.nan
