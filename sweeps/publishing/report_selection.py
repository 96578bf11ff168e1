"""Select the trials, and the value of each, for the report's figures of values.

With early stopping few trials reach the last epoch, and a stopped trial has no final value. So the
figures compare each trial's best value up to one epoch that all selected trials reached. What must
not live here: drawing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweeps.config.spec import SweepSpec

_ENOUGH = 10
"""A figure over two parameters needs about this many trials."""


@dataclass(frozen=True)
class ReportSelection:
    """Trials compared at one epoch."""

    epoch: int
    """0 if no trial has a value."""
    values: Mapping[int, float]
    """The best value up to that epoch, by the number of the trial."""
    target: str
    """The name of the values, for an axis."""
    sentence: str
    """A description of the selection, for the reader."""


def select_trials(
    spec: SweepSpec, states: Mapping[int, str], curves: Mapping[int, Mapping[int, float]]
) -> ReportSelection:
    """Select the trials at the latest epoch that ten trials reached, or all if there are fewer.

    Args:
        spec: The sweep.
        states: The states of its trials; failed ones are left out, as samplers do.
        curves: Each trial's reported values, by epoch.
    """
    finite = {
        number: {epoch: value for epoch, value in curves[number].items() if math.isfinite(value)}
        for number, state in states.items()
        if state != "failed"
    }
    ends = sorted((max(curve) for curve in finite.values() if curve), reverse=True)
    if not ends:
        return ReportSelection(0, {}, spec.metrics[0], "")
    epoch = ends[min(_ENOUGH, len(ends)) - 1]
    best = min if spec.modes[0] == "min" else max
    values = {
        number: best(value for at, value in curve.items() if at <= epoch)
        for number, curve in finite.items()
        if curve and min(curve) <= epoch <= max(curve)
    }
    return ReportSelection(epoch, values, *_words(spec, epoch, len(values), ends))


def _words(spec: SweepSpec, epoch: int, count: int, ends: Sequence[int]) -> tuple[str, str]:
    if epoch == spec.budget.epochs:
        return spec.metrics[0], f"Drawn from the {count} trials that reached the last epoch."
    further = sum(end > epoch for end in ends)
    return (
        f"{spec.metrics[0]} by epoch {epoch}",
        f"Drawn from the {count} trials that reached epoch {epoch}, each with its best "
        f"{spec.metrics[0]} up to there; {further} of them went further.",
    )
