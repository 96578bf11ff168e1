"""What ends a whole sweep before its trials are spent: a target that is reached, a plateau, its
time.

Whether a sweep is to end is a function of its spec and its ledger, so a resume, another terminal
and the driver agree on it, and a changed spec lets it go on. What must not live here: ending
anything (`tuning`), and the time that one signal leaves (`interrupt`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from sweeps.config.sections import StopConfig
from sweeps.config.spec import SweepSpec
from sweeps.ledger.reader import TrialSummary, best_report

if TYPE_CHECKING:  # who only looks at a sweep does without Optuna
    from sweeps.ledger.ledger import Ledger

BY_THE_SWEEP = "stopped with the sweep: "
"""How the reason of a trial begins that was pruned because its sweep came to an end."""
_KEEP_EVERY = 10.0
"""Seconds of a sweep's time that a driver which is killed may leave uncounted."""


@dataclass(frozen=True)
class StopCriterionMet:
    """A stop that holds."""

    key: str
    """What of the spec it is."""
    why: str
    """What has happened, for people."""
    continue_overrides: tuple[str, ...]
    """The changes to the spec, `KEY=VALUE` each, with which the sweep goes on; none: it cannot."""


def active_stop_criterion(
    spec: SweepSpec, trials: Sequence[TrialSummary], seconds: float
) -> StopCriterionMet | None:
    """Return the stop that ends a sweep; None while it goes on, and where it had nothing to end.

    Args:
        trials: All that there are.
        seconds: How long its trials have been run, by all drivers together.
    """
    if not _watches(spec):
        return None
    if len(trials) >= spec.trials and all(t.finished and not _cut_short(t) for t in trials):
        return None
    found = _target(spec, trials) or _plateau(spec, trials) or _time(spec, seconds)
    if found is None or len(trials) < spec.trials:
        return found
    # All were begun, and who was stopped does not go on.
    most = spec.max_trials(2 * len(trials))
    more = (*found.continue_overrides, f"trials={most}") if most > len(trials) else ()
    return replace(found, continue_overrides=more)


def _watches(spec: SweepSpec) -> bool:
    """Whether anything may end the sweep early."""
    return spec.stop != StopConfig()


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
    # One with a reason was stopped by its user or by a stop: it was not tried.
    tried = [t for t in trials if t.state in ("complete", "pruned") and t.reason is None]
    tried.sort(
        key=lambda trial: (trial.finish_order, trial.ended_at or datetime.min, trial.number)
    )

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
    """The best value of those that trained to their end: only these can be a sweep's best."""
    values = [t.value for t in trials if t.state == "complete" and t.value is not None]
    return best_report(values, minimize=minimize)


class StopMonitor:
    """Watches, in a driver, whether the sweep is to end, and counts its time in the ledger.

    Args:
        spec: The sweep.
        ends: How many trials came to their end by now.
        settle: Returns once the ledger knows of all of them.
        fence: Called right before anything is written; raises when another driver may run the
            sweep by now.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        spec: SweepSpec,
        ledger: Ledger,
        *,
        ends: Callable[[], int],
        settle: Callable[[], object],
        fence: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._ledger, self._clock = spec, ledger, clock
        self._ends, self._settle, self._fence = ends, settle, fence
        self._num_ends = 0
        self._before = self._kept = ledger.seconds
        self._started = clock()
        self._trials = ledger.trials()

    def look(self) -> StopCriterionMet | None:
        """Return the stop that holds; called in each turn of the driver's loop."""
        # To read thousands at each one's end takes long, and the disk is waited for.
        if _watches(self._spec) and self._num_ends != (ends := self._ends()):
            self._settle()
            self._num_ends, self._trials = ends, self._ledger.trials()
        over = active_stop_criterion(self._spec, self._trials, self._seconds)
        # A driver that is killed leaves the time that was kept: the next one is to stop as well.
        news = (
            over is not None
            and active_stop_criterion(self._spec, self._trials, self._kept) is None
        )
        if news or self._seconds - self._kept >= _KEEP_EVERY:
            self.keep()
        return over

    def keep(self) -> None:
        """Write the sweep's time down."""
        self._fence()
        self._kept = self._seconds
        self._ledger.note_seconds(self._kept)

    @property
    def _seconds(self) -> float:
        return self._before + self._clock() - self._started
