"""Lets any proposer play the field: what it proposes is trained, or its neighbour in a table.

A proposer is asked for a job and told of each report, as `programs/serve.py` has it. A known trial
resumes where it paused, and pays for its new epochs alone; what it has already reported is told
again for nothing. What must not live here: processes (`process.py`), and counting
(`quality_sweeps.drive`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.bench.curves.pool import AskTell
from tests.bench.curves.pool import Job as PoolJob
from tests.bench.curves.tables import Params
from tests.bench.field.grounds import Ground, Round
from tests.bench.quality_sweeps import Params as TrialParams

_FREE = 200
"""Jobs in a row that train nothing, after which a proposer has nothing more to say."""


class Proposer(Protocol):
    """Another search."""

    def ask(self) -> dict[str, Any] | None:
        """Return `trial`, `params` and `until`; None: nothing before another report."""

    def tell(self, **report: Any) -> bool:
        """Take `trial`, `params`, `epoch`, `loss` and `last`; returns whether training goes on."""


@dataclass
class _Trial:
    """What is known of a proposer's trial."""

    name: str
    params: Params
    losses: list[float] = field(default_factory=list)
    until: int = 0

    @property
    def over(self) -> bool:
        """Whether it diverged."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])


class Played:
    """A searcher of ask and tell, as `AskTell` takes it, that passes on what a proposer says."""

    def __init__(self, proposer: Proposer, ground: Ground, meets: Round) -> None:
        self._proposer, self._take = proposer, meets.take
        self._names = {key: f"x{index}" for index, key in enumerate(ground.space)}
        self._epochs = ground.epochs
        self._numbers: dict[str, int] = {}
        self._waiting: list[dict[str, Any]] = []
        self.trials: list[_Trial] = []
        self._running: set[int] = set()

    def ask(self) -> PoolJob | None:
        """Return the next job that trains something."""
        for job in self._jobs():
            number = self._number(job)
            if number is None:
                return None
            trial = self.trials[number]
            if number in self._running:
                self._waiting.append(job)
                continue
            trial.until = min(job["until"], self._epochs)
            if len(trial.losses) < trial.until and not trial.over:
                self._running.add(number)
                return PoolJob(number, trial.until)
            self._report(trial, min(len(trial.losses), trial.until), last=True)
        return None

    def tell(self, number: int, epoch: int, loss: float) -> bool:
        """Pass a report on."""
        trial = self.trials[number]
        trial.losses.append(loss)
        last = epoch >= trial.until or not math.isfinite(loss)
        goes_on = self._report(trial, epoch, last=last) and not last
        if not goes_on:
            self._running.discard(number)
        return goes_on

    def _report(self, trial: _Trial, epoch: int, *, last: bool) -> bool:
        loss = trial.losses[epoch - 1]
        return self._proposer.tell(
            trial=trial.name,
            params={self._names[key]: value for key, value in trial.params.items()},
            epoch=epoch,
            loss=loss if math.isfinite(loss) else None,
            last=last,
        )

    def _jobs(self) -> Iterator[dict[str, Any]]:
        """Yield what waited for its own trial to pause, then what the proposer asks for."""
        for job in [one for one in self._waiting if self._is_free(one)]:
            self._waiting.remove(job)
            yield job
        for _ in range(_FREE):
            asked = None if self._is_full() else self._proposer.ask()
            if asked is None:
                return
            yield asked

    def _is_full(self) -> bool:
        return len(self._waiting) > len(self._running)

    def _is_free(self, job: dict[str, Any]) -> bool:
        return self._numbers[job["trial"]] not in self._running

    def _number(self, job: dict[str, Any]) -> int | None:
        name = job["trial"]
        if name not in self._numbers:
            try:
                params = self._take({key: job["params"][one] for key, one in self._names.items()})
            except LookupError:
                return None
            self._numbers[name] = len(self.trials)
            self.trials.append(_Trial(name, params))
        return self._numbers[name]


class PlayedSide(AskTell):
    """A proposer in the form that `drive` takes."""

    def __init__(self, proposer: Proposer, ground: Ground, meets: Round) -> None:
        self._played = Played(proposer, ground, meets)
        super().__init__(self._played, None)  # type: ignore[arg-type]

    def trial(self, config: dict[str, Any]) -> tuple[int, TrialParams]:
        """Return a trial's number and what it trains."""
        return config["number"], self._played.trials[config["number"]].params


class RandomPoints:
    """Trains configurations at random, each to its end."""

    def __init__(self, points: Iterator[Params], epochs: int) -> None:
        self._points, self._epochs, self._count = points, epochs, 0

    def ask(self) -> dict[str, Any] | None:
        """Return another configuration."""
        return self._job(self._epochs)

    def _job(self, until: int) -> dict[str, Any] | None:
        params = next(self._points, None)
        self._count += 1
        if params is None:
            return None
        named = {f"x{index}": value for index, value in enumerate(params.values())}
        return {"trial": str(self._count), "params": named, "until": until}

    def tell(self, **_: Any) -> bool:
        """Go on."""
        return True


class OneEpochThenTop(RandomPoints):
    """Trains configurations for one epoch with half of the budget, then the best to their end.

    R. Egele et al., "Is one epoch all you need for multi-fidelity hyperparameter optimization?"
    (2023), arXiv:2307.15422.
    """

    def __init__(self, points: Iterator[Params], epochs: int, budget: int) -> None:
        super().__init__(points, epochs)
        self._left = budget // 2
        self._open = 0
        self._first: dict[str, float] = {}

    def ask(self) -> dict[str, Any] | None:
        """Return a configuration for one epoch; once half of the budget is spent, the best."""
        if self._left:
            self._left -= 1
            if job := self._job(1):
                self._open += 1
                return job
            self._left = 0
        if self._open or not self._first:
            return None
        best = min(self._first, key=self._first.__getitem__)
        del self._first[best]
        return {"trial": best, "params": {}, "until": self._epochs}

    def tell(self, **report: Any) -> bool:
        """Remember the first loss of each."""
        if report["epoch"] == 1:
            self._open -= 1
            if report["loss"] is not None:
                self._first[report["trial"]] = report["loss"]
        return True
