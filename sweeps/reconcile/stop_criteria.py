"""The criteria that stop a whole sweep early: a target value, a plateau, a time limit.

By the spec and the ledger alone, so that driver, resume and another terminal agree, and a changed
spec continues. What must not live here: stopping anything (`run.tune_loop`), and the grace time
after a signal (`engine.signals`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sweeps.ledger.ranking import best_report
from sweeps.ledger.reasons import BY_THE_SWEEP, is_by_request
from sweeps.ledger.trials import TrialSummary, of_search
from sweeps.spec.sections import StopConfig
from sweeps.spec.spec import SweepSpec

if TYPE_CHECKING:  # commands that only read a sweep do not load Optuna
    from sweeps.ledger.ledger import Ledger

_KEEP_EVERY = 10.0
"""Seconds between two writes of the sweep's time; a killed driver loses at most these."""


@dataclass(frozen=True)
class StopCriterionMet:
    """A criterion that is met."""

    key: str
    """The key of the criterion in the spec."""
    why: str
    """What has happened, for people."""
    continue_overrides: tuple[str, ...]
    """Overrides of the spec, `KEY=VALUE` each, that let the sweep continue; empty: none do."""


def active_stop_criterion(
    spec: SweepSpec, trials: Sequence[TrialSummary], seconds: float
) -> StopCriterionMet | None:
    """Return the criterion that stops a sweep."""
    if not _watches(spec):
        return None
    seeds = [one for one in trials if one.role == "repeat"]
    trials = of_search(trials)
    if len(trials) >= spec.num_trials and all(
        one.settled and not _cut_short(one) for one in (*trials, *seeds)
    ):
        return None
    found = _target(spec, trials) or _plateau(spec, trials) or _time(spec, seconds)
    if found is None or len(trials) < spec.num_trials:
        return found
    # All trials were started, and a stopped trial does not resume.
    more = more_trials(spec, len(trials), None)
    return replace(found, continue_overrides=more and (*found.continue_overrides, *more))


def more_trials(
    spec: SweepSpec, num_trials: int, stop: StopCriterionMet | None
) -> tuple[str, ...]:
    """Return the overrides of a resume that runs more trials than those of the search so far."""
    if stop is not None:
        return stop.continue_overrides
    most = spec.max_trials(2 * num_trials)
    return (f"trials={most}",) if most > num_trials else ()


def _watches(spec: SweepSpec) -> bool:
    """Return whether the spec has a criterion."""
    return spec.stop != StopConfig()


def is_stopped_early(trial: TrialSummary) -> bool:
    """Return whether early stopping ended a trial, not the user or the end of the whole sweep."""
    return trial.state == "pruned" and not is_by_request(trial.reason)


def _cut_short(trial: TrialSummary) -> bool:
    return (trial.reason or "").startswith(BY_THE_SWEEP)


def _target(spec: SweepSpec, trials: Sequence[TrialSummary]) -> StopCriterionMet | None:
    target, minimize = spec.stop.value, spec.modes[0] == "min"
    best = _best(trials, minimize=minimize)
    if target is None or best is None or (best > target if minimize else best < target):
        return None
    return StopCriterionMet(
        "stop.value", f"{spec.metrics[0]} {best:g} has reached {target:g}", ("stop.value=null",)
    )


def _plateau(spec: SweepSpec, trials: Sequence[TrialSummary]) -> StopCriterionMet | None:
    count, minimize = spec.stop.plateau.trials, spec.modes[0] == "min"
    if count is None:
        return None
    # A trial that the user or a criterion stopped does not count.
    tried = [t for t in trials if t.settled and (t.state == "complete" or is_stopped_early(t))]
    tried.sort(key=lambda trial: trial.finish_order)

    def is_flat(count: int) -> bool:
        before = _best(tried[:-count], minimize=minimize)
        last = _best(tried[-count:], minimize=minimize)
        if before is None or last is None:
            return before is not None
        gain = before - last if minimize else last - before
        return gain <= spec.stop.plateau.min_delta

    if not is_flat(count):
        return None
    more = 2 * count
    while is_flat(more):
        more *= 2
    best = _best(tried, minimize=minimize)
    delta = f" by more than {spec.stop.plateau.min_delta:g}" if spec.stop.plateau.min_delta else ""
    return StopCriterionMet(
        "stop.plateau",
        f"the last {count} trials did not improve {spec.metrics[0]} ({best:g}){delta}",
        (f"stop.plateau.trials={more}",),
    )


def _time(spec: SweepSpec, seconds: float) -> StopCriterionMet | None:
    hours = spec.stop.hours
    if hours is None or seconds < hours * 3600:
        return None
    more = float(f"{2 * max(hours, seconds / 3600):.3g}")
    return StopCriterionMet(
        "stop.hours", f"its {hours:g} hours are over", (f"stop.hours={more:g}",)
    )


def _best(trials: Iterable[TrialSummary], *, minimize: bool) -> float | None:
    """Return the best value of the trials that can be the best of a sweep."""
    counted = (t for t in trials if t.has_result and t.feasible is not False)
    values = [t.value for t in counted if t.value is not None]
    return best_report(values, minimize=minimize)


class StopMonitor:
    """Watch the stop criteria in a driver, and count the sweep's time in the ledger."""

    def __init__(
        self,
        spec: SweepSpec,
        ledger: Ledger,
        *,
        ends: Callable[[], int],
        flush: Callable[[], object],
        fence: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._ledger, self._clock = spec, ledger, clock
        self._ends, self._flush, self._fence = ends, flush, fence
        self._num_ends = 0
        self._before = self._kept = ledger.seconds
        self._started = clock()
        self._trials = ledger.trials()

    def look(self) -> StopCriterionMet | None:
        """Return the criterion that is met; called in each turn of the driver's loop."""
        # Reading thousands of trials takes long and waits for the disk, so only when one ended.
        if _watches(self._spec) and self._num_ends != (ends := self._ends()):
            self._flush()
            self._num_ends, self._trials = ends, self._ledger.trials()
        over = active_stop_criterion(self._spec, self._trials, self._seconds)
        # A killed driver leaves the stored time; with it the next driver must stop as well.
        news = (
            over is not None
            and active_stop_criterion(self._spec, self._trials, self._kept) is None
        )
        if news or self._seconds - self._kept >= _KEEP_EVERY:
            self.keep()
        return over

    def keep(self) -> None:
        """Store the sweep's time in the ledger."""
        self._fence()
        self._kept = self._seconds
        self._ledger.store_seconds(self._kept)

    @property
    def _seconds(self) -> float:
        return self._before + self._clock() - self._started
