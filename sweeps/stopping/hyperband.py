"""The rule `hyperband`: several brackets of ASHA with different first rungs.

What must not live here: which trial belongs to which bracket (`halving`), and Ray (`schedulers`).
"""

from __future__ import annotations

from typing import ClassVar

from sweeps.stopping.asha import GeometricRungs, halving_stopper
from sweeps.stopping.halving import bracket_graces, bracket_of, rungs
from sweeps.stopping.metric_values import Minimize
from sweeps.stopping.rule import TrialStopper


class Hyperband(GeometricRungs):
    """Distribute trials over brackets of ASHA; the last bracket stops no trial."""

    name: ClassVar[str] = "hyperband"
    description: ClassVar[str] = (
        "runs ASHA in brackets with later and later first rungs; the last bracket stops no trial."
    )
    decides_per_report: ClassVar[bool] = True
    rungs_note: ClassVar[str] = (
        "Each of HyperBand's brackets begins one rung later than the one before: a trial counts "
        "at the rungs of its own bracket alone, so more may have reached a later rung."
    )

    def first_rung(self, number: int, epochs: int) -> int:
        """Return the bracket of the trial, which begins at the rung of the same index."""
        graces = bracket_graces(self.grace_epochs, self.reduction, epochs)
        return bracket_of(number, graces, self.reduction)

    def make_stopper(self, *, epochs: int, minimize: Minimize) -> TrialStopper | None:
        """Return a new stopper with all brackets, which has seen no reports.

        Ray's ASHA also has brackets, but draws a trial's bracket from NumPy's global generator. A
        trial could then have another bracket after a resume.
        """
        graces = bracket_graces(self.grace_epochs, self.reduction, epochs)
        return halving_stopper(
            [rungs(grace, self.reduction, epochs) for grace in graces],
            self.reduction,
            bracket_of=lambda number: bracket_of(number, graces, self.reduction),
            minimize=minimize,
        )
