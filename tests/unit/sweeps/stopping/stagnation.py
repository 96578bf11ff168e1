"""The rule `stagnation`: stop a trial that has not improved for some epochs.

It is the example of `docs/guides/extending.md`; a real one would lie in `sweeps/stopping/`.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from sweeps.stopping.rule import StoppingRule, TrialStopper


class Stagnation(StoppingRule):
    """Stop a trial after `stagnation` epochs without an improvement of its best value."""

    name: ClassVar[str] = "stagnation"
    description: ClassVar[str] = "stops a trial that has not improved for `stagnation` epochs."
    decides_per_report: ClassVar[bool] = True
    first_epoch_key: ClassVar[str | None] = "stagnation"

    stagnation: int = Field(default=5, ge=1)
    """`stagnation`: epochs without improvement after which a trial is stopped."""

    def no_rungs_reason(self) -> str:
        """Return when the rule decides instead."""
        return f"stagnation has no rungs: it waits {self.stagnation} epochs for an improvement"

    def make_stopper(self, *, epochs: int, minimize: bool) -> TrialStopper | None:
        """Return a stopper for a sweep without reports."""
        del epochs
        return StagnationStopper(self.stagnation, minimize=minimize)


class StagnationStopper:
    """Remember the best value of each trial and the epoch at which it was reported."""

    def __init__(self, stagnation: int, *, minimize: bool) -> None:
        self._stagnation = stagnation
        self._sign = 1 if minimize else -1
        self._best: dict[int, tuple[int, float]] = {}

    def stops(self, number: int, epoch: int, value: float) -> str | None:
        """Record a report; return why its trial stops, or None if it continues."""
        best_epoch, best = self._best.get(number, (0, math.inf))
        if self._sign * value < best:  # false for NaN
            best_epoch = epoch
            self._best[number] = (epoch, self._sign * value)
        if epoch - best_epoch < self._stagnation:
            return None
        return f"no improvement since epoch {best_epoch}"
