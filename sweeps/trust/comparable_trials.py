"""Select trials whose values can be compared, and the value of each.

With early stopping few trials reach the last epoch, and a stopped trial has no final value. So
trials are compared by their value up to one epoch that all of them reached: either all trials
at an early epoch, or the survivors at a later one. What must not live here: drawing, and sentences
about what was found (`findings`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sweeps.ledger.ranking import value_of
from sweeps.spec.spec import SweepSpec

_ENOUGH = 10
"""A figure over two parameters needs about this many trials."""


@dataclass(frozen=True)
class ComparableTrials:
    """Trials compared at one epoch."""

    epoch: int
    """0 if no trial has a value."""
    values: Mapping[int, float]
    """The value up to that epoch, as `select` defines it, by the number of the trial."""
    target: str
    """The name of the values, for an axis."""
    sentence: str
    """A description of the selection, for the reader."""


def compare_all(
    spec: SweepSpec, states: Mapping[int, str], curves: Mapping[int, Mapping[int, float]]
) -> ComparableTrials:
    """Select all trials, at the last epoch that every ended trial reached.

    With early stopping that is the lowest rung at which a trial was stopped.
    """
    finite = _finite_curves(states, curves)
    ended = [max(c) for n, c in finite.items() if states[n] in ("complete", "pruned")]
    epoch = min(ended or [max(curve) for curve in finite.values()], default=0)
    values = _values_by(spec, finite, epoch)
    if not values:
        return ComparableTrials(0, {}, spec.metrics[0], "")
    counted = f"Drawn from {_count(len(values))}, each with its {_which(spec)}"
    word = spec.budget.report_word
    if epoch == spec.budget.reports:
        return ComparableTrials(epoch, values, spec.metrics[0], f"{counted}.")
    sentence = f"{counted} up to {word} {epoch}, the last that every ended trial reached."
    return ComparableTrials(epoch, values, f"{spec.metrics[0]} by {word} {epoch}", sentence)


def compare_survivors(
    spec: SweepSpec, states: Mapping[int, str], curves: Mapping[int, Mapping[int, float]]
) -> ComparableTrials:
    """Select the trials at the latest epoch that ten trials reached, or all if there are fewer."""
    finite = _finite_curves(states, curves)
    ends = sorted(map(max, finite.values()), reverse=True)
    if not ends:
        return ComparableTrials(0, {}, spec.metrics[0], "")
    epoch = ends[min(_ENOUGH, len(ends)) - 1]
    values = _values_by(spec, finite, epoch)
    counted = f"Drawn from {_count(len(values))} that reached"
    word = spec.budget.report_word
    if epoch == spec.budget.reports:
        sentence = f"{counted} the last {word}."
        return ComparableTrials(epoch, values, spec.metrics[0], sentence)
    further = sum(end > epoch for end in ends)
    sentence = (
        f"{counted} {word} {epoch}, each with its {_which(spec)} up to there; {further} of "
        "them went further."
    )
    return ComparableTrials(epoch, values, f"{spec.metrics[0]} by {word} {epoch}", sentence)


def _finite_curves(
    states: Mapping[int, str], curves: Mapping[int, Mapping[int, float]]
) -> dict[int, dict[int, float]]:
    """Return the finite values of the trials that did not fail and have one."""
    found = {
        number: {epoch: value for epoch, value in curves[number].items() if math.isfinite(value)}
        for number, state in states.items()
        if state != "failed"
    }
    return {number: curve for number, curve in found.items() if curve}


def _values_by(
    spec: SweepSpec, curves: Mapping[int, Mapping[int, float]], epoch: int
) -> dict[int, float]:
    """Return the value of each trial by an epoch that it reached, as if it had ended there."""
    minimize, found = spec.modes[0] == "min", {}
    for number, curve in curves.items():
        until = {at: (value,) for at, value in curve.items() if at <= epoch}
        value = value_of(until, minimize=minimize, select=spec.select)
        if value is not None and epoch <= max(curve):
            found[number] = value[0]
    return found


def _which(spec: SweepSpec) -> str:
    return f"{'last' if spec.select == 'final' else 'best'} {spec.metrics[0]}"


def _count(number: int) -> str:
    return "1 trial" if number == 1 else f"{number} trials"
