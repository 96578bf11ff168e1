"""The rule `hyperband`: several brackets of ASHA with different first rungs.

What must not live here: the arithmetic of brackets (`halving`), and Ray's schedulers
(`schedulers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sweeps.early_stopping.asha import GeometricRungs
from sweeps.early_stopping.halving import bracket_graces, bracket_of
from trainable.config import Mode

if TYPE_CHECKING:  # a spec is read without Ray
    from ray.tune.schedulers import TrialScheduler


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

    def scheduler(self, *, epochs: int, mode: Mode) -> TrialScheduler:
        """Build one ASHA scheduler for each bracket."""
        from sweeps.early_stopping.schedulers import HyperbandScheduler

        graces = bracket_graces(self.grace_epochs, self.reduction, epochs)
        return HyperbandScheduler(graces, self.reduction, epochs=epochs, mode=mode)
