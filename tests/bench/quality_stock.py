"""Ray Tune's own search, as its documentation shows it: `OptunaSearch` with `ASHAScheduler`.

Both are the library's own, with what they do unless told otherwise; budget, grace period and
reduction are those of our side. What must not live here: anything of ours.
"""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search.optuna import OptunaSearch

from tests.bench.quality_problems import METRIC


class Stock:
    """Ray's searcher and scheduler.

    Args:
        space: What is searched.
        epochs: Of a full training.
        seed: Of the search.
        asha: Early stopping's grace period and reduction; None trains all to their end.
    """

    fails_at_nan = False
    """A loop that reports NaN goes on; `OptunaSearch` then never tells its study of that trial."""

    def __init__(
        self,
        space: dict[str, BaseDistribution],
        *,
        epochs: int,
        seed: int,
        asha: tuple[int, int] | None,
    ) -> None:
        self.searcher = OptunaSearch(space=space, metric=METRIC, mode="min", seed=seed)
        self.scheduler: TrialScheduler = FIFOScheduler()
        if asha is not None:
            grace, reduction = asha
            self.scheduler = ASHAScheduler(
                max_t=epochs, grace_period=grace, reduction_factor=reduction
            )
            self.scheduler.set_search_properties(METRIC, "min")
        self._number = -1

    def trial(self, config: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self._number += 1
        return self._number, config

    def reported(self, number: int, epoch: int, loss: float) -> None:
        """Nobody records."""

    def ended(self, number: int, ending: str) -> None:
        """Nobody records."""
