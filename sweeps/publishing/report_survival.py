"""How many trials reached each rung of early stopping, and what became of them there.

What must not live here: drawing, and the decision itself (`halving`, `schedulers`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.config.spec import SweepSpec
from sweeps.ledger.reader import TrialSummary


def rungs(spec: SweepSpec) -> list[int]:
    """Return the epochs at which early stopping decides on any trial, and the last one; none
    where it does not decide at rungs.
    """
    below = spec.early_stopping.rule.rungs(spec.budget.epochs)
    return [*below, spec.budget.epochs] if below else []


def survival(spec: SweepSpec, records: Sequence[TrialSummary]) -> dict[str, list[int]]:
    """Count what became of the trials that reached each rung.

    Args:
        spec: The sweep.
        records: Its trials, from number 0 on.

    Returns:
        By fate, one number for each rung: those that reached the next one, and those that have
        their end or are under way in between, by state. A rung's numbers add up to those that
        reached it and are judged there: with HyperBand, only some brackets' are.
    """
    levels, rule = rungs(spec), spec.early_stopping.rule
    firsts = [rule.first_rung(record.number, spec.budget.epochs) for record in records]
    counts: dict[str, list[int]] = {"went on": [0] * len(levels)}
    for record, first in zip(records, firsts, strict=True):
        for index in range(first, len(levels)):
            if record.epoch < levels[index]:
                break
            is_last = index == len(levels) - 1 or record.epoch < levels[index + 1]
            fate = record.state if is_last else "went on"
            counts.setdefault(fate, [0] * len(levels))[index] += 1
    return counts
