"""How good the trials that were drawn around priors are, beside the others.

Two trials are compared at the highest rung that both have reached, by their best values up to it.
So a trial that has just begun is not worse for that reason, and where curves cross the longest
common stretch decides. What must not live here: what follows from it (`prior_trials`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from sweeps.config.sections import Select
from sweeps.early_stopping.metric_values import losses
from sweeps.ledger.ranking import is_finite
from sweeps.search.trial_evidence import values_at


@dataclass(frozen=True)
class Comparison:
    """Compares trials.

    Attributes:
        rungs: The epochs at which trials of different lengths are compared, ascending.
        minimizes: For each metric, whether less is better.
        select: What the value of a trial is; see `SweepSpec.select`.
    """

    rungs: Sequence[int]
    minimizes: tuple[bool, ...]
    select: Select

    def wins(self, own: Sequence[FrozenTrial], others: Sequence[FrozenTrial]) -> float | None:
        """Return the estimated chance that a trial is better than another one.

        None before a trial of `own` has reached a rung or failed. One more rival counts as better,
        so that there is no chance without rivals, and one more trial wins half of the time.

        Args:
            own: The trials whose chance it is.
            others: Those they are compared with.
        """
        rivals = [one for one in map(self._losses, others) if one]
        shares = [
            sum(_points(one, other) for other in rivals) / (len(rivals) + 1)
            for one in map(self._losses, own)
            if one
        ]
        return (sum(shares) + 0.5) / (len(shares) + 1) if shares else None

    def _losses(self, trial: FrozenTrial) -> list[tuple[float, ...]]:
        """Return the losses at each rung that a trial has reached.

        They are infinite where its values are not finite, and at all rungs if its parameters made
        it fail.
        """
        found: list[tuple[float, ...]] = []
        for rung in self.rungs:
            values = values_at(trial, rung, minimize=self.minimizes[0], select=self.select)
            if values is None:
                break
            if is_finite(values):
                found.append(losses(values, self.minimizes))
            else:
                found.append((math.inf,) * len(self.minimizes))
        return found


def _points(one: Sequence[tuple[float, ...]], other: Sequence[tuple[float, ...]]) -> float:
    """Return 1 if a trial is better than another one, 0 if it is worse, else a half."""
    common = min(len(one), len(other)) - 1
    mine, theirs = one[common], other[common]
    if mine == theirs:
        return 0.5
    better, worse = (all(map(operator.le, *pair)) for pair in ((mine, theirs), (theirs, mine)))
    return 0.5 if better == worse else float(better)


def rungs_of(epochs: int) -> tuple[int, ...]:
    """Return where trials are compared that no rule stops: at doubling lengths, and at the end.

    Args:
        epochs: The reports of a full training.
    """
    return (*(2**power for power in range(epochs.bit_length()) if 2**power < epochs), epochs)
