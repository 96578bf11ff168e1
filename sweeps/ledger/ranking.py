"""What the value of a trial is, and which trials are the best: the one definition for every view.

What must not live here: reading a ledger (`reader`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence

from sweeps.ledger.trials import Trial
from sweeps.spec.sections import Select


def best_report(values: Iterable[float], *, minimize: bool) -> float | None:
    """Return the best finite value; None without one."""
    return (min if minimize else max)(filter(math.isfinite, values), default=None)


def best_reports(
    reports: Mapping[int, Sequence[float]], *, minimize: bool
) -> tuple[float, ...] | None:
    """Return the values of the report with the best first value; of equal reports, the earliest.

    A report with a value that is not finite is never the best.
    """
    finite = filter(is_finite, map(reports.__getitem__, sorted(reports)))
    best = (min if minimize else max)(finite, key=operator.itemgetter(0), default=None)
    return None if best is None else tuple(best)


def value_of(
    reports: Mapping[int, Sequence[float]], *, minimize: bool, select: Select
) -> tuple[float, ...] | None:
    """Return what the values of a trial are, by its reports; None if it has none.

    This is the one definition for every view, for the checkpoint that is exported, and for what
    Optuna receives when a trial is complete.
    """
    if select == "checkpoint":
        return best_reports(reports, minimize=minimize)
    last = tuple(reports[max(reports)]) if reports else ()
    return last if last and is_finite(last) else None


def is_finite(values: Sequence[float]) -> bool:
    """Whether all values are finite."""
    return all(map(math.isfinite, values))


def front(trials: Iterable[Trial], minimizes: Sequence[bool]) -> list[Trial]:
    """Return the best trial or the Pareto front, sorted by the first metric.

    Every view, every export and the tags in MLflow use this definition. With one metric, the best
    trial is the first in `ranking`. With several metrics, the Pareto front holds the trials of
    `ranking` that no other dominates.
    """
    ranked = ranking(trials, minimize=minimizes[0])
    if len(minimizes) == 1:
        return ranked[:1]
    return [ranked[index] for index in undominated([t.values for t in ranked], minimizes)]


def undominated(values: Sequence[Sequence[float]], minimizes: Sequence[bool]) -> list[int]:
    """Return the indices of values that no others dominate, sorted by the first value."""
    losses = [
        tuple(v if low else -v for v, low in zip(one, minimizes, strict=True)) for one in values
    ]
    kept: list[int] = []
    # In this order, no value dominates an earlier one.
    for index in sorted(range(len(losses)), key=losses.__getitem__):
        mine = losses[index]
        if not any(
            losses[other] != mine and all(map(operator.le, losses[other], mine)) for other in kept
        ):
            kept.append(index)
    return kept


def ranking(trials: Iterable[Trial], *, minimize: bool) -> list[Trial]:
    """Return the trials that have a result, sorted by the first metric, the best first.

    Of trials with equal values, complete trials come first.
    """
    found = [t for t in trials if t.has_result and t.value is not None]
    sign = 1 if minimize else -1
    return sorted(found, key=lambda t: (sign * (t.value or 0.0), t.state != "complete"))
