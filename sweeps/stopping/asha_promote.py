"""The rule `asha_promote`: ASHA that pauses trials at rungs instead of stopping them.

What must not live here: which trial is promoted (`halving`).
"""

from __future__ import annotations

from typing import ClassVar

from sweeps.stopping.asha import GeometricRungs
from sweeps.stopping.halving import SuccessiveHalving
from sweeps.stopping.metric_values import Minimize
from sweeps.stopping.rule import PausingRule


class AshaPromote(GeometricRungs):
    """Pause every trial at each rung, and promote the best."""

    name: ClassVar[str] = "asha_promote"
    description: ClassVar[str] = (
        "pauses every trial at each rung and promotes the best 1/`reduction`."
    )

    def pausing(self, *, epochs: int, minimize: Minimize, num_trials: int) -> PausingRule | None:
        """Return successive halving over the rungs of this rule."""
        return SuccessiveHalving(
            rungs=self.rungs(epochs),
            minimize=minimize,
            num_trials=num_trials,
            reduction=self.reduction,
        )
