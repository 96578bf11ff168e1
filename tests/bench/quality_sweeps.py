"""Sweeps over problems, through their decisions alone.

`drive` calls searcher, scheduler and ledger in the order in which Ray Tune calls them, and trains
in between by a function call, so that thousands of trainings take seconds. It is for counting
epochs, never time. What must not live here: problems, statistics, and a peer (`quality_stock.py`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from ray.air.constants import TRAINING_ITERATION
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from sweeps.ledger.ledger import Ledger
from sweeps.ledger.trials import Ending, TrialRecord
from sweeps.paths import SweepPaths
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher
from sweeps.spec.spec import SweepSpec
from sweeps.stopping.schedulers import TIME, make_scheduler
from tests.bench.quality_problems import METRIC
from trainable.adapters.ray import OBJECTIVE

_T = TypeVar("_T")

Params = Mapping[str, Any]
Train = Callable[[int, Params], Iterator[float]]
"""Trains the trial of a number with parameters; yields its loss after each epoch."""


class Report(NamedTuple):
    """A trial came to the end of an epoch; `loss` is NaN where it failed."""

    params: Params
    epoch: int
    loss: float
    clock: float
    """When, in the time that epochs take; see `drive`."""


class Side(Protocol):
    """A searcher, a scheduler and what records their trials."""

    @property
    def scheduler(self) -> TrialScheduler:
        """Says which trials stop."""

    @property
    def searcher(self) -> Searcher:
        """Hands out trials."""

    @property
    def fails_at_nan(self) -> bool:
        """Whether a loss that is not finite ends a trial as failed."""

    def trial(self, config: dict[str, Any]) -> tuple[int, Params]:
        """The number and the parameters of a trial, from what the searcher suggested."""

    def reported(self, number: int, epoch: int, loss: float) -> None:
        """Record a report."""

    def ended(self, number: int, ending: Ending) -> None:
        """Record an end."""


def own_seed(search: str, seed: int) -> int:
    """Return a seed for one search: equal ones give several of them the same first points."""
    return zlib.crc32(f"{search} {seed}".encode()) % 2**31


class Ours:
    """A sweep's own searcher and scheduler, over a ledger in memory."""

    fails_at_nan = True

    def __init__(self, spec: SweepSpec) -> None:
        paths = SweepPaths(Path("nowhere"), spec.name)
        self._ledger = Ledger.create(Path(":memory:"), mode="min", sweep_id="bench")
        self.scheduler = make_scheduler(spec)
        assert spec.concurrency is not None
        self.searcher = LedgerSearcher(
            self._ledger,
            spec,
            paths,
            DriverCallbacks(fence=lambda: None, refuse=lambda *_: None),
            Capacity(spec.concurrency, 1),
        )

    def trial(self, config: dict[str, Any]) -> tuple[int, Params]:
        return config["number"], config["params"]

    def reported(self, number: int, epoch: int, loss: float) -> None:
        self._ledger.report(number, epoch=epoch, step=epoch, value=loss)

    def ended(self, number: int, ending: Ending) -> None:
        # The reason as a driver stores it, by which samplers tell kinds of failures apart.
        reason = "non_finite: the loss is NaN" if ending == "failed" else None
        self._ledger.finish(number, ending, reason=reason)

    def best(self) -> TrialRecord | None:
        return self._ledger.best()

    def trials(self) -> list[TrialRecord]:
        return self._ledger.trials()


@dataclass(frozen=True)
class _Turn:
    """A stretch of a trial's training, as Ray Tune knows it; schedulers read the first two."""

    trial_id: str
    config: dict[str, Any]
    training: _Training


@dataclass
class _Training:
    number: int
    params: Params
    losses: Iterator[float]
    epoch: int = 0


def _alike(params: Params, epoch: int) -> float:
    del params, epoch
    return 1.0


def drive(
    side: Side,
    train: Train,
    *,
    epochs: int,
    at_once: int,
    seconds: Callable[[Params, int], float] = _alike,
) -> Iterator[Report]:
    """Run trials until the searcher has none left; yields their reports in the order of time.

    A trial that pauses (its configuration's `until` says when) gives its place away, and goes on
    when the searcher hands it out again.

    Args:
        side: What is asked and told.
        train: Trains a trial.
        epochs: Of a full training.
        at_once: How many trials train at the same time.
        seconds: What an epoch takes, by parameters; one unit of time by default.
    """
    told: Any = side.scheduler  # of Ray Tune it is shown nothing but trials, as in a replay
    running: list[tuple[float, int, _Turn]] = []  # a heap by the end of the present epoch
    order = itertools.count()  # of two that end at the same time, the one that began first
    now = 0.0

    def begin_epoch(turn: _Turn) -> None:
        training = turn.training
        ends = now + seconds(training.params, training.epoch + 1)
        heapq.heappush(running, (ends, next(order), turn))

    trainings: dict[int, _Training] = {}
    for turn_id in map(str, itertools.count()):
        while len(running) < at_once:
            config = side.searcher.suggest(f"{turn_id}-{len(running)}")
            if not isinstance(config, dict):
                break
            number, params = side.trial(config)
            if number not in trainings:
                trainings[number] = _Training(number, params, train(number, params))
            turn = _Turn(f"{turn_id}-{len(running)}", config, trainings[number])
            told.on_trial_add(None, turn)
            begin_epoch(turn)
        if not running:
            return
        now, _, turn = heapq.heappop(running)
        training = turn.training
        until = turn.config.get("pause_at_epoch") or epochs
        training.epoch += 1
        loss = next(training.losses, math.nan)
        yield Report(training.params, training.epoch, loss, now)
        failed = side.fails_at_nan and not math.isfinite(loss)
        result: dict[str, Any] = {}
        verdict = TrialScheduler.STOP
        if not failed:
            result = {
                **dict.fromkeys((TIME, TRAINING_ITERATION), training.epoch),
                **dict.fromkeys((OBJECTIVE, METRIC), loss),
            }
            if training.epoch < until:
                verdict = told.on_trial_result(None, turn, result)
            if verdict != TrialScheduler.STOP:
                side.searcher.on_trial_result(turn.trial_id, result)
            side.reported(training.number, training.epoch, loss)
        if verdict != TrialScheduler.STOP:
            begin_epoch(turn)
            continue
        told.on_trial_complete(None, turn, result)
        side.searcher.on_trial_complete(turn.trial_id, result)
        if failed:
            side.ended(training.number, "failed")
        elif training.epoch == epochs:
            side.ended(training.number, "complete")
        elif training.epoch < until:
            side.ended(training.number, "pruned")
