"""Which trials the figures of values are drawn from, and which value of each.

Early stopping lets few trials reach the end, and a trial that was stopped has no final value. What
can be compared honestly is every trial's best value up to one epoch that all of them reached. What
must not live here: drawing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweeps.config.spec import SweepSpec

_ENOUGH = 10
"""Trials from which a figure of two parameters says something."""


@dataclass(frozen=True)
class ReportSelection:
    """Trials compared at one epoch."""

    epoch: int
    """0 where no trial has a value."""
    values: Mapping[int, float]
    """The best one up to that epoch, by the number of the trial."""
    target: str
    """What the values are, as an axis says it."""
    sentence: str
    """From what is drawn, for the reader."""


def basis(
    spec: SweepSpec, states: Mapping[int, str], curves: Mapping[int, Mapping[int, float]]
) -> ReportSelection:
    """Return the latest epoch that ten trials reached, or all where there are fewer.

    Args:
        spec: The sweep.
        states: Of its trials; those that failed are left out, as the samplers do.
        curves: What each trial reported, by epoch.
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
