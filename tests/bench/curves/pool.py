"""Search a table: its configurations are a pool, each trained once and resumed where it paused.

Nothing is interpolated: each loss and each second was recorded. A searcher that proposes any point
of the space gets the nearest configuration that it has not had, by the distance in the unit cube.

- Ours learns from the parameters of that configuration, as if it had proposed them (`PooledOurs`).
- A searcher that cannot be told other parameters than its own learns its neighbour's loss
  (`Mapped`).
- A searcher of ask and tell chooses the configurations itself (`AskTell`).

Costs are counted by `quality_sweeps.drive`, for all alike: a training that is resumed pays for its
new epochs alone. What must not live here: counting, and the files of tables (`tables.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from ray.tune.schedulers import TrialScheduler

from sweeps.ledger.ledger import Suggestion
from sweeps.ledger.trials import Ending
from sweeps.search.suggest import Suggester
from sweeps.spec.spec import SweepSpec
from tests.bench.curves.tables import CurveTable, Params
from tests.bench.quality_sweeps import Ours, Side


class Pool:
    """The configurations of a table, handed out without replacement.

    Args:
        table: The recorded curves.
        seeds: Those that trainings may have; each configuration trains under one of them.
        random: Draws which.
    """

    def __init__(
        self, table: CurveTable, seeds: tuple[int, ...], random: np.random.Generator
    ) -> None:
        self.table = table
        self.seeds = random.choice(seeds, len(table.params))
        self._unseen = np.ones(len(table.params), dtype=bool)
        self._index = {_key(params): index for index, params in enumerate(table.params)}

    def take_nearest(self, params: Params) -> int:
        """Return the nearest configuration that was not taken before.

        Raises:
            LookupError: All were taken.
        """
        if not self._unseen.any():
            raise LookupError(f"all {len(self._unseen)} configurations of the table were taken")
        apart = ((self.table.places - self.table.place(params)) ** 2).sum(axis=1)
        found = int(np.where(self._unseen, apart, np.inf).argmin())
        self._unseen[found] = False
        return found

    def index(self, params: Params) -> int:
        """Return the number of a recorded configuration."""
        return self._index[_key(params)]

    def train(self, number: int, params: Params) -> Iterator[float]:
        """Yield the recorded losses of a configuration; ends early where it diverged."""
        del number
        found = self.index(params)
        yield from self.table.curve(found, self.seeds[found])

    def seconds(self, params: Params, epoch: int) -> float:
        """Return what an epoch cost, counted from 1."""
        found = self.index(params)
        return float(self.table.prices[found, self.seeds[found], epoch - 1])


def _key(params: Params) -> tuple[Any, ...]:
    return tuple(sorted(params.items()))


class _PooledSuggester(Suggester):
    """Replaces each suggestion by the nearest configuration of a pool."""

    pool: Pool

    def propose(self, number: int, stored: Mapping[str, Any] | None = None) -> Suggestion:
        """Return the parameters of a recorded configuration."""
        suggestion = super().propose(number, stored)
        found = self.pool.table.params[self.pool.take_nearest(suggestion.params)]
        return replace(suggestion, params=dict(found))


class PooledOurs(Ours):
    """A sweep's own searcher and scheduler over a pool."""

    def __init__(self, spec: SweepSpec, pool: Pool) -> None:
        super().__init__(spec)
        suggester = _PooledSuggester(spec, self._ledger)
        suggester.pool = pool
        self.searcher._suggester = suggester


class Mapped:
    """Another side, whose suggestions are replaced by recorded configurations behind its back."""

    def __init__(self, side: Side, pool: Pool) -> None:
        self._side, self._pool = side, pool
        self._taken: dict[int, Params] = {}
        self.scheduler = side.scheduler
        self.searcher: Any = _Limited(side.searcher, len(pool.table.params))
        self.fails_at_nan = side.fails_at_nan

    def trial(self, config: dict[str, Any]) -> tuple[int, Params]:
        """Return the number of a trial, and the recorded parameters in place of its own."""
        number, params = self._side.trial(config)
        if number not in self._taken:
            self._taken[number] = self._pool.table.params[self._pool.take_nearest(params)]
        return number, self._taken[number]

    def reported(self, number: int, epoch: int, loss: float) -> None:
        """Record a report."""
        self._side.reported(number, epoch, loss)

    def ended(self, number: int, ending: Ending) -> None:
        """Record an end."""
        self._side.ended(number, ending)


class _Limited:
    """A searcher that has no more to suggest once the table has no more configurations."""

    def __init__(self, searcher: Any, most: int) -> None:
        self._suggest, self._left = searcher.suggest, most
        self.on_trial_result = searcher.on_trial_result
        self.on_trial_complete = searcher.on_trial_complete

    def suggest(self, trial_id: str) -> Any:
        if not self._left:
            return None
        self._left -= 1
        return self._suggest(trial_id)


class Job(NamedTuple):
    """Train a configuration of the table until an epoch; it resumes where it paused before."""

    configuration: int
    until: int


class Searcher(Protocol):
    """What is asked for jobs, and told the losses."""

    def ask(self) -> Job | None:
        """Return what a free worker does; None: nothing before another report."""

    def tell(self, configuration: int, epoch: int, loss: float) -> bool:
        """Take the loss after an epoch, NaN where the training diverged; says if it goes on."""


class AskTell:
    """A searcher of ask and tell in the form that `drive` takes."""

    fails_at_nan = True

    def __init__(self, searcher: Searcher, table: CurveTable) -> None:
        self._searcher, self._table = searcher, table
        self._told: dict[int, int] = {}
        self.scheduler: Any = _Decisions(self)
        self.searcher: Any = _Suggestions(searcher)

    def tell(self, configuration: int, epoch: int, loss: float) -> bool:
        """Tell the searcher of each report once."""
        self._told[configuration] = epoch
        return self._searcher.tell(configuration, epoch, loss)

    def trial(self, config: dict[str, Any]) -> tuple[int, Params]:
        """Return a configuration's number and parameters."""
        number = config["number"]
        return number, self._table.params[number]

    def reported(self, number: int, epoch: int, loss: float) -> None:
        """Tell of a job's last report, on which nothing is decided."""
        if self._told.get(number) != epoch:
            self.tell(number, epoch, loss)

    def ended(self, number: int, ending: Ending) -> None:
        """Tell of a training that diverged."""
        if ending == "failed":
            self.tell(number, self._told.get(number, 0) + 1, float("nan"))


class _Suggestions:
    """The calls that Ray Tune makes to a searcher."""

    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        del trial_id
        job = self._searcher.ask()
        if job is None:
            return None
        return {"number": job.configuration, "pause_at_epoch": job.until}

    def on_trial_result(self, *_: Any) -> None:
        """Decided before."""

    def on_trial_complete(self, *_: Any) -> None:
        """Told before."""


class _Decisions:
    """The calls that Ray Tune makes to a scheduler."""

    def __init__(self, side: AskTell) -> None:
        self._side = side

    def on_trial_add(self, *_: Any) -> None:
        """Nothing is known of it yet."""

    def on_trial_complete(self, *_: Any) -> None:
        """Told before."""

    def on_trial_result(self, _controller: Any, turn: Any, result: dict[str, Any]) -> str:
        goes_on = self._side.tell(
            turn.training.number, result["training_iteration"], result["loss"]
        )
        return TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP
