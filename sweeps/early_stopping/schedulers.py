"""The schedulers that Ray Tune calls, and how a new one learns what a sweep reported before.

A trial that pauses at a rung (`asha_promote`, `pbt`) does so by itself, and the searcher promotes
it. To Tune each stretch of such a trial is a trial of its own, so Tune keeps no state of it. What
must not live here: which rule a spec names (`registry`), and the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from sweeps.early_stopping.halving import bracket_of, rungs
from sweeps.early_stopping.pausing_rules import Reports, StopDecider, make_pausing_rule
from trainable.config import Mode
from trainable.ray_adapter import OBJECTIVE

if TYPE_CHECKING:  # a rule builds its scheduler, and this package lies below the specs
    from sweeps.config.spec import SweepSpec
    from sweeps.early_stopping.rule import TrialStopper

TIME = "epoch"
"""The result key by which schedulers measure the progress of a trial."""


def make_stopper_scheduler(stopper: TrialStopper | None) -> TrialScheduler:
    """Return a scheduler that asks a stopper after each report; None: it stops no trial."""
    if stopper is None:
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    return StopperScheduler(stopper)


class StopperScheduler(FIFOScheduler):
    """Ask a `TrialStopper` after each report.

    Ray's own median rule cannot be used: it rejects past reports of a trial that it would have
    stopped, and counts the last report of a trial that it has stopped twice.
    """

    def __init__(self, stopper: TrialStopper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stopper = stopper

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        del tune_controller
        return TrialScheduler.STOP if self._stops(trial, result) else TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        del tune_controller
        if OBJECTIVE in result:  # the last result of a failed trial has none
            self._stops(trial, result)

    def _stops(self, trial: Any, result: Mapping[str, Any]) -> bool:
        return self._stopper.stops(trial.config["number"], result[TIME], result[OBJECTIVE])


class AshaScheduler(ASHAScheduler):
    """Ray's ASHA, except that a trial with a value that is not finite stops at its rung.

    Ray receives no such value: every comparison with NaN is false, and an infinite value makes
    the percentile of a rung infinite or NaN.
    """

    def __init__(self, grace: int, reduction: int, *, epochs: int, mode: Mode) -> None:
        super().__init__(
            time_attr=TIME,
            metric=OBJECTIVE,
            mode=mode,
            max_t=epochs,
            grace_period=grace,
            reduction_factor=reduction,
            # A run ends by its own budget; only a trial that the scheduler stops is pruned.
            stop_last_trials=False,
        )
        self._at = rungs(grace, reduction, epochs)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if OBJECTIVE in result and not math.isfinite(result[OBJECTIVE]):
            return TrialScheduler.STOP if result[TIME] in self._at else TrialScheduler.CONTINUE
        return str(super().on_trial_result(tune_controller, trial, result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if OBJECTIVE in result and not math.isfinite(result[OBJECTIVE]):
            self.on_trial_remove(tune_controller, trial)
        else:
            super().on_trial_complete(tune_controller, trial, result)


class HyperbandScheduler(FIFOScheduler):
    """HyperBand as several brackets of ASHA, each with a later first rung than the one before.

    Ray's ASHA also has brackets, but draws the bracket of a trial from NumPy's global generator.
    After a resume a trial would get another bracket. Here the trial's number determines it.
    """

    def __init__(self, graces: Sequence[int], reduction: int, *, epochs: int, mode: Mode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graces, self._reduction = graces, reduction
        self.brackets = [
            AshaScheduler(grace, reduction, epochs=epochs, mode=mode) for grace in graces
        ]

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        self._of(trial).on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return str(self._of(trial).on_trial_result(tune_controller, trial, result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        self._of(trial).on_trial_complete(tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._of(trial).on_trial_remove(tune_controller, trial)

    def _of(self, trial: Any) -> Any:
        return self.brackets[bracket_of(trial.config["number"], self._graces, self._reduction)]


def make_verdict_fn(spec: SweepSpec) -> StopDecider:
    """Return a function that tells which unfinished trials of a sweep have to stop.

    A driver may die between a report and the stop that follows from it. The next driver then
    decides again. A paused trial stops when it can no longer be promoted.
    """
    pausing = make_pausing_rule(spec)
    if pausing is not None:
        return pausing.never_promoted

    def verdict(reports: Reports, unfinished: Set[int]) -> frozenset[int]:
        return stopped_trials(make_scheduler(spec), reports, unfinished)

    return verdict


def make_scheduler(spec: SweepSpec) -> TrialScheduler:
    """Build the scheduler of a sweep without reports."""
    rule = spec.early_stopping.rule
    return rule.scheduler(epochs=spec.budget.epochs, mode=spec.modes[0])


class _PastTrial(NamedTuple):
    """The fields of a trial that a scheduler reads."""

    trial_id: str
    config: dict[str, int]


def replay(
    scheduler: TrialScheduler,
    trial_id: str,
    reports: Mapping[int, float],
    *,
    number: int,
    finished: bool,
) -> bool:
    """Pass the past reports of a trial to a new scheduler by the calls that Tune makes.

    An unfinished trial must be replayed under the id that Tune gives it now. A rung then knows
    the trial and does not count it twice.

    Args:
        scheduler: The scheduler, which afterwards has the state that these reports lead to.
        trial_id: The id of the trial.
        reports: The metric after each reported epoch.
        number: The number of the trial.
        finished: Whether the trial has its end.

    Returns:
        Whether the scheduler stops the trial at its last report.
    """
    trial = _PastTrial(trial_id, {"number": number})
    untyped: Any = scheduler  # no scheduler reads the controller or more of the trial
    untyped.on_trial_add(None, trial)
    verdict = TrialScheduler.CONTINUE
    for epoch in sorted(reports):
        verdict = untyped.on_trial_result(None, trial, {TIME: epoch, OBJECTIVE: reports[epoch]})
    if finished:
        untyped.on_trial_remove(None, trial)
    return bool(verdict == TrialScheduler.STOP)


def stopped_trials(
    scheduler: TrialScheduler, reports: Reports, unfinished: Set[int]
) -> frozenset[int]:
    """Return the unfinished trials that the scheduler stops at their last report.

    The scheduler did not stop a trial at its earlier reports, because training followed them.

    Args:
        scheduler: A new one. The call changes its state; do not use it again.
        reports: By trial, the metric after each reported epoch.
        unfinished: Trials without an end.
    """
    for number in sorted(reports.keys() - unfinished):
        replay(scheduler, str(number), reports[number], number=number, finished=True)
    return frozenset(
        number
        for number in sorted(unfinished)
        if replay(scheduler, str(number), reports[number], number=number, finished=False)
    )
