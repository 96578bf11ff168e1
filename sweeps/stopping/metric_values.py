"""What a stopping rule compares: the value of one metric, or the values of several in one order.

What must not live here: the rules, each of which has a module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sweeps.formatting import format_number
from sweeps.statistics.feasibility import INFEASIBLE_LOSS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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


_LIKE_A_METRIC = 1e200
"""Smaller numbers are values of a metric; a bar may lie between these and `INFEASIBLE_LOSS`."""


def format_needed(sign: str, value: float) -> str:
    """Return what a trial needed to continue: `at most 0.5`."""
    is_metric = abs(value) < _LIKE_A_METRIC
    return f"{sign} {format_number(value)}" if is_metric else "a smaller violation"


def stop_reason(
    rule: str, when: str, metrics: Sequence[str], values: Sequence[float], why: str
) -> str:
    """Return why a trial stopped: `asha at epoch 3: val/loss 0.9, needed at most 0.5`.

    A rule of one metric receives the first of several values.
    """
    named = zip(metrics, values, strict=False)
    shown = ", ".join(f"{metric} {format_number(value)}" for metric, value in named)
    return f"{rule} at {when}: {shown}, {why}"


_CELLS = 2**17
"""The cells of the grid on which volumes are measured; one call takes a few milliseconds."""
_MOST_METRICS = 16
"""With more metrics, a grid of so few cells has fewer than two levels of each."""


def own_volumes(front: npt.ArrayLike, worst: npt.ArrayLike) -> list[float]:
    """Return the volume that each point of a front dominates and no other point does.

    This is the hypervolume contribution of Beume, Naujoks and Emmerich, "SMS-EMOA" (2007). Each
    metric is scaled to the range from the best of the front to the worst of all, and the volume
    ends a tenth of this range behind the worst. Equal points share one contribution. Volumes are
    exact as long as a grid with a level for each value has at most 131,072 cells (362 points in
    two metrics, 50 in three); beyond, close values become equal.
    """
    import numpy as np

    points = np.asarray(front, dtype=float) / 2  # so that no difference overflows
    num_metrics = points.shape[1]
    if num_metrics > _MOST_METRICS:
        return [0.0] * len(points)
    low = points.min(axis=0)
    span = np.asarray(worst, dtype=float) / 2 - low
    scaled = (points - low) / np.where(span > 0, span, 1.0)
    most = int(_CELLS ** (1 / num_metrics))
    for axis in range(num_metrics):
        if len(np.unique(scaled[:, axis])) > most:
            scaled[:, axis] = np.minimum(np.floor(scaled[:, axis] * most), most - 1) / most
    distinct, which = np.unique(scaled, axis=0, return_inverse=True)
    edges = [np.unique(distinct[:, axis]) for axis in range(num_metrics)]
    cells = tuple(np.searchsorted(edge, distinct[:, k]) for k, edge in enumerate(edges))
    count = np.zeros([len(edge) for edge in edges], dtype=np.int64)
    owner = np.zeros_like(count)
    count[cells], owner[cells] = 1, np.arange(len(distinct))
    volume = np.ones(())
    for axis, edge in enumerate(edges):  # a point dominates all cells behind its own
        count, owner = count.cumsum(axis=axis), owner.cumsum(axis=axis)
        volume = np.multiply.outer(volume, np.diff(edge, append=1.1))
    alone = count == 1
    found = np.bincount(owner[alone], weights=volume[alone], minlength=len(distinct))
    return [round(float(one), 12) for one in found[which.reshape(-1)]]


def worst_of(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest losses of the feasible points; of all of them if none is feasible."""
    feasible = points[points[:, 0] < INFEASIBLE_LOSS]
    worst: npt.NDArray[np.float64] = (feasible if len(feasible) else points).max(axis=0)
    return worst


def places(values: Mapping[int, Value], minimize: tuple[bool, ...]) -> dict[int, int]:
    """Return the place of each trial among all of them, from 1; none if it is not finite.

    Schmucker et al., "Multi-objective Asynchronous Successive Halving" (2021), choose whom to
    promote by such fronts. Trials that are equal have the same place.
    """
    finite = {n: losses(one, minimize) for n, one in values.items() if is_finite(one)}
    if not finite:
        return {}
    import numpy as np

    from sweeps.statistics.fronts import fronts

    numbers, points = [*finite], np.array([*finite.values()])
    found: dict[int, int] = {}
    for front in fronts(points):
        before, volumes = len(found), own_volumes(points[front], worst_of(points))
        ranked = sorted(volumes, reverse=True)
        for at, one in zip(front, volumes, strict=True):
            found[numbers[at]] = before + 1 + ranked.index(one)
    return found


def as_losses(values: Mapping[int, Value], minimize: Minimize) -> dict[int, float]:
    """Return one number for each trial, less being better; trials that are not finite have none.

    With one metric it is the metric or its negation; with several, the trial's place.
    """
    if isinstance(minimize, tuple):
        return {number: float(place) for number, place in places(values, minimize).items()}
    return {n: losses(one, minimize)[0] for n, one in values.items() if is_finite(one)}
