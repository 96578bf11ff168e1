"""Which sweeps have trials that pause, and by which rule they go on. What must not live here: the
rules (`halving`, `population`).
"""

from __future__ import annotations

from sweeps.config.spec import SweepSpec
from sweeps.early_stopping.halving import PausingRule, SuccessiveHalving, rungs
from sweeps.early_stopping.pbt import PopulationBasedTraining


def make_pauses(spec: SweepSpec) -> PausingRule | None:
    """Return when a sweep's trials pause, and who goes on; None where no trial ever pauses."""
    early, epochs = spec.early_stopping, spec.budget.epochs
    minimize = spec.modes[0] == "min"
    match early.scheduler:
        case "asha_promote":
            return SuccessiveHalving(
                rungs=rungs(early.grace_epochs, early.reduction, epochs),
                minimize=minimize,
                num_trials=spec.trials,
                reduction=early.reduction,
                epochs=epochs,
            )
        case "pbt" | "pb2":
            every = range(early.interval_epochs, epochs, early.interval_epochs)
            return PopulationBasedTraining(
                rungs=tuple(every), minimize=minimize, num_trials=spec.trials
            )
        case _:
            return None
