"""Simulate how long the trials of a sweep train, by running its stopping rule on invented curves.

The rule is the one that the sweep uses; only the curves and the speeds are invented. What is
assumed: trials are drawn at random, none fails, further seeds of a configuration do not change
what its rule compares, and the loss after epoch e is
`level + fall * e**-power` with normal noise. This is the family pow3 of Domhan et al., "Speeding
Up Automatic Hyperparameter Optimization of Deep Neural Networks by Extrapolation of Learning
Curves" (2015). `level` is uniform from 0 to 1, `fall` from 0.5 to 1.5, `power` from 0.3 to 1; the
noise has the standard deviation 0.02. A sampler that finds better and better trials lets more of
them continue. What must not live here: seconds, memory and disk (`engine.sweep_plan`).
"""

from __future__ import annotations

import heapq
import math
from copy import copy
from dataclasses import dataclass, replace
from random import Random
from statistics import mean

from sweeps.stopping.rule import PausingRule, Standing, StoppingRule

_NOISE = 0.02
_MOST_REPEATS, _FEWEST_REPEATS = 20, 5
_MOST_TRIALS, _MOST_PAUSING = 500, 100
"""Of a larger sweep so many trials are simulated, and their epochs are scaled up. The time for
pausing trials grows with the square of their number."""
_MOST_REPORTS = 60_000
"""About so many reports of one call are simulated: it then takes a few tenths of a second."""
_MOST_READ = 200
"""Of longer curves, about so many reports are simulated, evenly spaced."""


@dataclass(frozen=True)
class SimulatedSweep:
    """What the trials of a sweep train, all together: means over repeated simulations.

    Attributes:
        epochs: Reports of all trials.
        least_epochs: Those of the shortest repeat.
        most_epochs: Those of the longest repeat.
        length: From the first start to the last end, in epochs, if a start takes no time.
        starts: How often a training starts or is promoted.
        complete: How many trials train to the end.
        trials: How many trials were simulated in each repeat.
        repeats: 0 if nothing stops a trial, so that nothing was simulated but the length.
    """

    epochs: float
    least_epochs: float
    most_epochs: float
    length: float
    starts: float
    complete: float
    trials: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class SweepShape:
    """How large a sweep is that is simulated.

    Attributes:
        epochs: Reports of a full training.
        trials: Configurations.
        at_once: Trainings that run at once.
        patience: After so many reports without a new best a training ends; None: never.
        seeds: Trainings of each configuration.
        exempt: The share of the trials that the rule does not stop.
    """

    epochs: int
    trials: int
    at_once: int
    patience: int | None = None
    seeds: int = 1
    exempt: float = 0.0


def simulate(rule: StoppingRule, shape: SweepShape) -> SimulatedSweep:
    """Return what a sweep would train. The same arguments give the same result."""
    epochs, trials, patience = shape.epochs, shape.trials, shape.patience
    every = _report_interval(epochs, patience)
    reads = _reports_read(rule, epochs, patience, every)
    pausing = _pausing(rule, epochs, trials) is not None
    most = min(
        _MOST_PAUSING if pausing else _MOST_TRIALS,
        _MOST_REPORTS // (_FEWEST_REPEATS * len(reads)),
    )
    simulated = min(trials, max(most, 10))
    at_once = min(shape.at_once, trials * shape.seeds)
    workers = math.ceil(at_once * simulated / trials)
    stops = reads != (epochs,)
    repeats = 1
    if stops:
        repeats = _MOST_REPORTS // (simulated * len(reads) * (1 + 5 * pausing))
        repeats = min(max(repeats, _FEWEST_REPEATS), _MOST_REPEATS)
    few = None if patience is None else max(1, patience // every)
    smaller = replace(shape, trials=simulated, at_once=workers, patience=few)
    found = [_Simulation(rule, reads, smaller, repeat).run() for repeat in range(repeats)]
    larger = trials / simulated
    totals = [total * larger for total, _, _, _ in found]
    return SimulatedSweep(
        epochs=mean(totals),
        least_epochs=min(totals),
        most_epochs=max(totals),
        length=mean(length for _, length, _, _ in found) * larger * workers / at_once,
        starts=mean(starts for _, _, starts, _ in found) * larger,
        complete=mean(complete for _, _, _, complete in found) * larger,
        trials=simulated,
        repeats=repeats if stops else 0,
    )


def _report_interval(epochs: int, patience: int | None) -> int:
    """Return which reports of a long curve are simulated where every one counts."""
    every = max(1, epochs // _MOST_READ)
    return every if patience is None else max(1, min(every, patience // 10))


def _reports_read(
    rule: StoppingRule, epochs: int, patience: int | None, every: int
) -> tuple[int, ...]:
    """Return the reports at which a trial may end or pause: with rungs, only these."""
    rungs = () if rule.is_population else rule.rungs(epochs)
    if patience is not None and patience < epochs - 1:
        return tuple(sorted({*range(every, epochs, every), *rungs, epochs}))
    if rungs or rule.is_population:
        return (*rungs, epochs)
    if rule.make_stopper(epochs=epochs, minimize=True) is None:
        return (epochs,)
    return (*range(every, epochs, every), epochs)


def _pausing(rule: StoppingRule, epochs: int, trials: int) -> PausingRule | None:
    """Return when trials pause; None for a population, whose members all train to the end."""
    if rule.is_population:
        return None
    return rule.pausing(epochs=epochs, minimize=True, num_trials=trials)


class _Trial:
    """A trial with its invented curve and speed."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._level, self._fall = random.random(), random.uniform(0.5, 1.5)
        self._power = random.uniform(0.3, 1.0)
        self.seconds = random.uniform(0.95, 1.05)  # for an epoch whose mean is 1
        self.is_exempt = self.would_stop = self.is_further = False
        self.reports: dict[int, float] = {}
        self.epoch, self._best, self.since_best = 0, math.inf, 0

    def with_further_seed(self) -> _Trial:
        """Return the same curve with other noise, before its first report."""
        found = copy(self)
        found.reports, found.is_further = {}, True
        found.epoch, found._best, found.since_best = 0, math.inf, 0
        return found

    def report(self, epoch: int) -> float:
        """Train to an epoch, and return the loss there."""
        loss: float = (
            self._level + self._fall * epoch**-self._power + self._random.gauss(0, _NOISE)
        )
        self.reports[epoch], self.epoch = loss, epoch
        self.since_best = 0 if loss < self._best else self.since_best + 1
        self._best = min(self._best, loss)
        return loss


class _Simulation:
    """One sweep: workers take trials, and the rule ends them, or pauses and promotes them."""

    def __init__(
        self,
        rule: StoppingRule,
        reads: tuple[int, ...],
        shape: SweepShape,
        seed: int,
    ) -> None:
        self._reads, self._shape, self._num_trials = reads, shape, shape.trials
        self._random = Random(f"simulated sweep {seed}")
        self._draw_exempt = Random(f"exempt trials {seed}")
        self._trials: list[_Trial] = []
        self._further: list[_Trial] = []  # seeds after the first, numbered after all trials
        self._num_further = 0  # how many of them have started
        self._num_starts = 0
        self._unfinished: set[int] = set()
        self._complete: set[int] = set()
        self._live: set[int] = set()
        self._events: list[tuple[float, int, int]] = []
        """When a trial makes a report: the time, the trial and the epoch."""
        last = reads[-1]
        self._stopper = rule.make_stopper(epochs=last, minimize=True)
        self._pausing = _pausing(rule, last, shape.trials)

    def run(self) -> tuple[int, float, int, int]:
        """Return the epochs of all trials, the time of the last end, starts, complete trials."""
        now = 0.0
        self._fill(now)
        while self._events:
            now, number, epoch = heapq.heappop(self._events)
            if self._continues(number, epoch):
                self._schedule(number, now)
            else:
                self._live.discard(number)
                self._fill(now)
        trained = [*self._trials, *self._further]
        complete = sum(trial.epoch == self._reads[-1] for trial in trained)
        return sum(trial.epoch for trial in trained), now, self._num_starts, complete

    def _fill(self, now: float) -> None:
        """Give each free worker a trial: a further seed, a promoted one, or else a new one."""
        while len(self._live) < self._shape.at_once:
            number = self._next_trial()
            if number is None:
                return
            self._live.add(number)
            self._num_starts += 1
            self._schedule(number, now)

    def _next_trial(self) -> int | None:
        if self._num_further < len(self._further):
            self._num_further += 1
            return self._num_trials + self._num_further - 1
        if self._pausing is not None:
            reports = {number: trial.reports for number, trial in enumerate(self._trials)}
            exempt = {number for number, trial in enumerate(self._trials) if trial.is_exempt}
            live = {number for number in self._live if number < self._num_trials}
            found = self._pausing.next_promotion(
                Standing(reports, self._unfinished, live, exempt, self._complete)
            )
            if found is not None:
                return found
        if len(self._trials) >= self._num_trials:
            return None
        self._trials.append(_Trial(self._random))
        self._trials[-1].is_exempt = self._draw_exempt.random() < self._shape.exempt
        self._unfinished.add(len(self._trials) - 1)
        return len(self._trials) - 1

    def _schedule(self, number: int, now: float) -> None:
        """Add the next report of a trial that trains on."""
        trial = self._trial(number)
        epoch = next(one for one in self._reads if one > trial.epoch)
        time = now + (epoch - trial.epoch) * trial.seconds
        heapq.heappush(self._events, (time, number, epoch))

    def _trial(self, number: int) -> _Trial:
        later = number - self._num_trials
        return self._trials[number] if later < 0 else self._further[later]

    def _continues(self, number: int, epoch: int) -> bool:
        """Make a report; return whether the worker goes on with this trial."""
        trial = self._trial(number)
        loss = trial.report(epoch)
        is_last = epoch == self._reads[-1]
        is_last |= self._shape.patience is not None and trial.since_best >= self._shape.patience
        stopped = not trial.is_further and self._is_stopped(trial, number, epoch, loss)
        if not is_last and not stopped:
            pauses = self._pausing is not None and epoch in self._pausing.rungs
            return not pauses or trial.is_exempt or trial.is_further
        self._unfinished.discard(number)
        if is_last and not trial.is_further:
            self._complete.add(number)
            self._further += [trial.with_further_seed() for _ in range(self._shape.seeds - 1)]
        return False

    def _is_stopped(self, trial: _Trial, number: int, epoch: int, loss: float) -> bool:
        if self._stopper is None or trial.would_stop:
            return False
        trial.would_stop = self._stopper.stops(number, epoch, loss) is not None
        return trial.would_stop and not trial.is_exempt
