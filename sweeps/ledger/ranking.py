"""What the value of a trial is, at its end and at a rung, and which trials are the best.

This is the one definition for every view, export and tag in MLflow, for what Optuna and samplers
see, for the evidence of priors, and for what a warm start keeps of earlier sweeps. What must not
live here: reading a ledger (`reader`), and the values that stopping rules compare (`stopping`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sweeps.ledger.reasons import is_by_request
from sweeps.ledger.trials import Trial
from sweeps.spec.sections import Select
from sweeps.stopping.metric_values import Value, all_values
from sweeps.stopping.patience import BY_PATIENCE


def best_report(values: Iterable[float], *, minimize: bool) -> float | None:
    """Return the best finite value; None without one."""
    return (min if minimize else max)(filter(math.isfinite, values), default=None)


def best_reports(
    reports: Mapping[int, Sequence[float]], *, minimize: bool
) -> tuple[float, ...] | None:
    """Return the finite report with the best first value; of equal ones, the earliest."""
    finite = filter(is_finite, map(reports.__getitem__, sorted(reports)))
    best = (min if minimize else max)(finite, key=operator.itemgetter(0), default=None)
    return None if best is None else tuple(best)


def value_of(
    reports: Mapping[int, Sequence[float]], *, minimize: bool, select: Select
) -> tuple[float, ...] | None:
    """Return what the values of a trial are, by its reports; None if it has none."""
    if select == "checkpoint":
        return best_reports(reports, minimize=minimize)
    last = tuple(reports[max(reports)]) if reports else ()
    return last if last and is_finite(last) else None


def is_finite(values: Sequence[float]) -> bool:
    """Whether all values are finite."""
    return all(map(math.isfinite, values))


def front(
    trials: Iterable[Trial], minimizes: Sequence[bool], *, so_far: bool = False
) -> list[Trial]:
    """Return the best trial, or with several metrics the Pareto front, sorted by the first.

    No trial is among them that misses a limit on a reported metric.
    """
    ranked = ranking(trials, minimize=minimizes[0], so_far=so_far)
    ranked = [one for one in ranked if one.feasible is not False]
    if len(minimizes) == 1:
        return ranked[:1]
    return [ranked[index] for index in undominated([t.values for t in ranked], minimizes)]


def front_so_far(trials: Iterable[Trial], minimizes: Sequence[bool]) -> list[Trial]:
    """Return the front of the trials that have ended, and of those that have not, by now."""
    return front(trials, minimizes, so_far=True)


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


def ranking(trials: Iterable[Trial], *, minimize: bool, so_far: bool = False) -> list[Trial]:
    """Return the trials that have a result, the best first, complete ones before their equals.

    Infeasible ones follow all others, those first that miss their limits by less.
    With `so_far` those that have not ended count, too, by what they have reported.
    """
    counted = [t for t in trials if (t.has_result_so_far if so_far else t.has_result)]
    found = [t for t in counted if t.value is not None]
    sign = 1 if minimize else -1
    return sorted(
        found, key=lambda t: (t.violation, sign * (t.value or 0.0), t.state != "complete")
    )


def closest(trials: Iterable[Trial]) -> Trial | None:
    """Return the trial that misses its limits by the least, if each one with a result does."""
    ranked = ranking(trials, minimize=True, so_far=True)
    return ranked[0] if ranked and ranked[0].feasible is False else None


NOT_FINITE = (math.nan,)
"""The values of a training that has reached a rung and has no finite value there."""


def values_by(
    reports: Mapping[int, Value], rung: int, *, minimize: bool, select: Select
) -> tuple[float, ...]:
    """Return the values of a training that reached a rung, or ended before it; `NOT_FINITE`."""
    so_far = {epoch: all_values(one) for epoch, one in reports.items() if epoch <= rung}
    return value_of(so_far, minimize=minimize, select=select) or NOT_FINITE


def values_over_seeds(
    every: Sequence[tuple[float, ...]], combine: Callable[[Sequence[float]], float]
) -> tuple[float, ...]:
    """Return the values of a configuration by those of its seeds at a rung; `NOT_FINITE`.

    Each seed has its own best report, as in the value of an ended configuration. The best of a
    curve over seeds would be another number.
    """
    if not all(map(is_finite, every)):
        return NOT_FINITE
    return tuple(combine(metric) for metric in zip(*every, strict=True))


def is_cut_off(
    *, complete: bool, reason: str | None, last: int, budget: int, earlier: Collection[int]
) -> bool:
    """Return whether the end of a trial, complete or pruned, says nothing of its parameters.

    So does a request, and the end of a budget that was shorter than today's. A trial that ended
    by patience, or whose own loop ended, has trained to its end under any budget.
    """
    if not complete:
        return is_by_request(reason)
    return last < budget and last in earlier and not (reason or "").startswith(BY_PATIENCE)
