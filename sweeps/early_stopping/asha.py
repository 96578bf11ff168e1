"""ASHA, asynchronous successive halving: the rule `asha`, and the parameters of all halving rules.

What must not live here: the arithmetic of rungs (`halving`), and Ray's scheduler (`schedulers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sweeps.early_stopping.halving import rungs
from sweeps.early_stopping.rule import StoppingRule
from trainable.config import Mode

if TYPE_CHECKING:  # a spec is read without Ray
    from ray.tune.schedulers import TrialScheduler


class GeometricRungs(StoppingRule):
    """Base of the rules with a first rung and a constant factor between two rungs."""

    first_epoch_key: ClassVar[str | None] = "grace_epochs"

    grace_epochs: int = Field(default=1, ge=1)
    """Epochs that every trial gets; below `budget.epochs`."""
    reduction: int = Field(default=3, ge=2)
    """One trial in this many continues beyond a rung; also the factor between two rungs."""

    def rungs(self, epochs: int) -> tuple[int, ...]:
        """Return the geometric rungs below the budget."""
        return rungs(self.grace_epochs, self.reduction, epochs)

    def comparable_epochs(self, epochs: int) -> tuple[int, ...]:
        """Return the geometric rungs and the end of the budget."""
        return (*rungs(self.grace_epochs, self.reduction, epochs), epochs)


class Asha(GeometricRungs):
    """Stop a trial at a rung unless it is among the best there so far."""

    name: ClassVar[str] = "asha"
    description: ClassVar[str] = (
        "stops a trial at a rung unless it is among the best 1/`reduction` there so far."
    )
    decides_per_report: ClassVar[bool] = True

    def scheduler(self, *, epochs: int, mode: Mode) -> TrialScheduler:
        """Build Ray's ASHA scheduler."""
        from sweeps.early_stopping.schedulers import AshaScheduler

        return AshaScheduler(self.grace_epochs, self.reduction, epochs=epochs, mode=mode)
