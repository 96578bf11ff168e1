"""Count the trials that reached each rung of early stopping, by what happened to them there.

What must not live here: drawing, and the decision itself (`early_stopping`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.config.spec import SweepSpec
from sweeps.ledger.trials import TrialSummary


def rungs(spec: SweepSpec) -> list[int]:
    """Return the epochs of all rungs, and the last epoch; empty if the rule has no rungs."""
    below = spec.early_stopping.rule.rungs(spec.budget.reports)
    return [*below, spec.budget.reports] if below else []


def survival(spec: SweepSpec, records: Sequence[TrialSummary]) -> dict[str, list[int]]:
    """Count the trials that reached each rung, by what happened to them next.

    Args:
        spec: The sweep.
        records: Its trials.

    Returns:
        Lists with one count for each rung. Trials under `continued` reached the next rung. The
        others did not, and are counted under their state. The counts of a rung add up to the
        trials that reached it and have a decision there; in HyperBand, some brackets have none.
    """
    levels, rule = rungs(spec), spec.early_stopping.rule
    records = [record for record in records if record.role != "repeat"]
    firsts = [rule.first_rung(record.place, spec.budget.reports) for record in records]
    counts: dict[str, list[int]] = {"continued": [0] * len(levels)}
    for record, first in zip(records, firsts, strict=True):
        for index in range(first, len(levels)):
            if record.epoch < levels[index]:
                break
            is_last = index == len(levels) - 1 or record.epoch < levels[index + 1]
            fate = record.state if is_last else "continued"
            counts.setdefault(fate, [0] * len(levels))[index] += 1
    return counts
