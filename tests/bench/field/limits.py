"""Limits of the field: searches that know how trainings will end, and are no competitors.

They say how many epochs a better rule or better suggestions could save at most, by the same count
and the same targets. The sampler is ours, and hears of a training's end after its first epoch.
What must not live here: searches that anybody could run (`searches.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sweeps.ledger.ledger import Suggestion
from sweeps.ledger.trials import Ending
from sweeps.spec.spec import SweepSpec
from tests.bench.curves.pool import PooledOurs
from tests.bench.field.grounds import Ground, Round
from tests.bench.quality_cases import ASHA
from tests.bench.quality_sweeps import Ours, Params, Side

_GoesOn = Callable[[Ground, Round, Params], bool]


def _everything(_ground: Ground, _meets: Round, _params: Params) -> bool:
    return True


def _in_target(ground: Ground, meets: Round, params: Params) -> bool:
    return meets.regret(params) <= ground.level


class Foreseeing:
    """A sweep's own searcher and scheduler, whose sampler knows the end of each training.

    Args:
        ground: The problem.
        meets: What this search meets of it.
        spec: The sweep, with its rule or without.
        bare: The same sweep without a rule; its ledger has the ends.
        records: Whether a training stops after an epoch unless it will end as the best so far.
        goes_on: Whether a training goes on, by what its configuration is worth.
    """

    fails_at_nan = True

    def __init__(
        self,
        ground: Ground,
        meets: Round,
        spec: SweepSpec,
        bare: SweepSpec,
        *,
        records: bool,
        goes_on: _GoesOn,
    ) -> None:
        self._ground, self._meets = ground, meets
        self._shown, self._known = (_ours(one, meets) for one in (spec, bare))
        self.scheduler, self.searcher = self._shown.scheduler, self._shown.searcher
        self._propose = self._known.searcher._suggester.propose
        self.reads_results = False  # each report is written at once
        self.searcher._suggester = self  # type: ignore[assignment]
        self._records, self._goes_on = records, goes_on
        self._lowest = math.inf
        self._losses: dict[int, list[float]] = {}

    def propose(self, number: int) -> Suggestion:
        """Return what the sampler suggests, knowing the ends."""
        suggestion = self._propose(number)
        self._known._ledger.add(suggestion)
        return suggestion

    def trial(self, config: dict[str, Any]) -> tuple[int, Params]:
        """Return a trial's number and parameters; it is to pause if nothing will come of it."""
        number, params = self._shown.trial(config)
        if number not in self._losses:
            losses = self._losses[number] = list(self._meets.train(number, params))
            end = min(losses) if self._is_whole(losses) else math.inf
            goes_on = self._goes_on(self._ground, self._meets, params)
            if not goes_on or (self._records and end >= self._lowest):
                config["pause_at_epoch"] = 1
            else:
                self._lowest = min(end, self._lowest)
        return number, params

    def reported(self, number: int, epoch: int, loss: float) -> None:
        """Record a report; after the first, tell the sampler of the end."""
        self._shown.reported(number, epoch, loss)
        if epoch > 1:
            return
        losses = self._losses[number]
        for one, value in enumerate(losses, 1):
            self._known.reported(number, one, value)
        self._known.ended(number, "complete" if self._is_whole(losses) else "failed")

    def ended(self, number: int, ending: Ending) -> None:
        """Record an end."""
        self._shown.ended(number, ending)
        if not self._losses[number]:
            self._known.ended(number, ending)

    def _is_whole(self, losses: list[float]) -> bool:
        return len(losses) == self._ground.epochs and math.isfinite(losses[-1])


def _ours(spec: SweepSpec, meets: Round) -> Ours:
    return Ours(spec) if meets.pool is None else PooledOurs(spec, meets.pool)


def _limit(
    sampler: str,
    rule: Mapping[str, Any] | None = None,
    *,
    records: bool = False,
    goes_on: _GoesOn = _everything,
) -> Callable[[Ground, Round, int, int], Side]:
    bare = {"search": {"sampler": sampler}}
    parts = bare if rule is None else {**bare, "early_stopping": rule}

    def make(ground: Ground, meets: Round, workers: int, seed: int) -> Side:
        spec, knowing = (ground.spec(workers, seed, one) for one in (parts, bare))
        return Foreseeing(ground, meets, spec, knowing, records=records, goes_on=goes_on)

    return make


_PROMOTE = {**ASHA, "scheduler": "asha_promote"}
LIMITS = {
    "limit: random, the rest stopped": _limit("random", records=True),
    "limit: tpe, the rest stopped": _limit("tpe", records=True),
    "limit: random, only the target trained": _limit("random", records=True, goes_on=_in_target),
    "limit: tpe, only the target trained": _limit("tpe", records=True, goes_on=_in_target),
    "limit: tpe that knows the ends + asha_promote": _limit("tpe", _PROMOTE),
    "limit: tpe that knows the ends": _limit("tpe"),
}
