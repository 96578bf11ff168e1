"""Early stopping: the schedulers that Ray Tune asks, and how the ledger's past is told to a fresh
one.

A trial that pauses at a rung (`asha_promote`, `pbt`) does so by itself, and the searcher promotes
it: to Tune each stretch of it is a run of its own, so nothing of it lies in Tune's state. What
must not live here: the ledger itself; a scheduler only sees intermediate values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from sweeps.config.spec import EarlyStoppingConfig, SweepSpec
from sweeps.early_stopping.halving import Judge, Mode, Reports, bracket_graces, bracket_of, rungs
from sweeps.early_stopping.median import Medians
from sweeps.early_stopping.pausing_rules import make_pauses
from trainable.ray_adapter import OBJECTIVE

TIME = "epoch"
"""The result key that schedulers measure a trial's progress by."""


def make_scheduler(config: EarlyStoppingConfig, *, epochs: int, mode: Mode) -> TrialScheduler:
    """Build the scheduler that a spec names.

    Args:
        epochs: The budget of a full run; no rung lies beyond it.
    """
    match config.scheduler:
        case "asha":
            return Asha(config.grace_epochs, config.reduction, epochs=epochs, mode=mode)
        case "hyperband":
            graces = bracket_graces(config.grace_epochs, config.reduction, epochs)
            return Hyperband(graces, config.reduction, epochs=epochs, mode=mode)
        case "median":
            return MedianRule(config.grace_epochs, config.min_trials, mode=mode)
        case "asha_promote" | "pbt" | "pb2" | "none":
            return FIFOScheduler()  # type: ignore[no-untyped-call]


class Asha(ASHAScheduler):
    """Ray's ASHA, but that what is not finite goes no further than its rung.

    To Ray nothing is less than NaN, and an infinite value makes its percentile one: neither is
    told to it.
    """

    def __init__(self, grace: int, reduction: int, *, epochs: int, mode: Mode) -> None:
        super().__init__(
            time_attr=TIME,
            metric=OBJECTIVE,
            mode=mode,
            max_t=epochs,
            grace_period=grace,
            reduction_factor=reduction,
            # a run ends by its own budget; only the scheduler's choice counts as pruned
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


class Hyperband(FIFOScheduler):
    """HyperBand as several brackets of ASHA, each with a later first rung than the one before.

    Ray's ASHA has brackets too, and draws a trial's from NumPy's global generator: after a resume
    it would be another one. Here it is a function of the trial's number.
    """

    def __init__(self, graces: Sequence[int], reduction: int, *, epochs: int, mode: Mode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graces, self._reduction = graces, reduction
        self.brackets = [Asha(grace, reduction, epochs=epochs, mode=mode) for grace in graces]

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


class MedianRule(FIFOScheduler):
    """Stops a trial that is worse than the median of the others.

    Ray's cannot be told the past: it refuses reports of a trial that it would have stopped, and
    counts the last report of one that it has stopped twice.
    """

    def __init__(self, grace: int, min_trials: int, *, mode: Mode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._medians = Medians(grace, min_trials, minimize=mode == "min")

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        del tune_controller
        self._note(trial, result)
        stops = self._medians.stops(trial.config["number"])
        return TrialScheduler.STOP if stops else TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        del tune_controller
        if OBJECTIVE in result:  # a failed trial's last result has none
            self._note(trial, result)

    def _note(self, trial: Any, result: Mapping[str, Any]) -> None:
        self._medians.note(trial.config["number"], result[TIME], result[OBJECTIVE])


def make_verdict_fn(spec: SweepSpec) -> Judge:
    """Return what says which unfinished trials of a sweep the scheduler stops where they are.

    A driver may die between a report and carrying out the verdict on it; the verdict is then
    given anew. One that paused is stopped once nothing can promote it any more.
    """
    early, epochs, mode = spec.early_stopping, spec.budget.epochs, spec.modes[0]
    pauses = make_pauses(spec)

    def judge(reports: Reports, unfinished: Set[int]) -> frozenset[int]:
        if pauses is not None:
            return pauses.never_promoted(reports, unfinished)
        return stopped_trials(make_scheduler(early, epochs=epochs, mode=mode), reports, unfinished)

    return judge


class _PastTrial(NamedTuple):
    """What a scheduler reads of a trial."""

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
    """Tell a fresh scheduler what a trial reported before, so that it stands where it stood.

    It goes through the scheduler's front door, the calls that Tune itself makes. An unfinished
    trial must be replayed under the id that Tune gives it now: a rung then knows it and does not
    count it twice.

    Args:
        reports: The metric after each reported epoch.
        number: The trial's.

    Returns:
        Whether the scheduler would stop the trial at its last report.
    """
    trial = _PastTrial(trial_id, {"number": number})
    told: Any = scheduler  # there is no controller and no real trial in the past; neither is read
    told.on_trial_add(None, trial)
    verdict = TrialScheduler.CONTINUE
    for epoch in sorted(reports):
        verdict = told.on_trial_result(None, trial, {TIME: epoch, OBJECTIVE: reports[epoch]})
    if finished:
        told.on_trial_remove(None, trial)
    return bool(verdict == TrialScheduler.STOP)


def stopped_trials(
    scheduler: TrialScheduler, reports: Reports, unfinished: Set[int]
) -> frozenset[int]:
    """Return the unfinished trials that the scheduler stops at their last report.

    Earlier reports of a trial were followed by training, so the verdict on them is known.

    Args:
        scheduler: A fresh one, which is used up by this.
        reports: By trial, the metric after each reported epoch.
    """
    for number in sorted(reports.keys() - unfinished):
        replay(scheduler, str(number), reports[number], number=number, finished=True)
    return frozenset(
        number
        for number in sorted(unfinished)
        if replay(scheduler, str(number), reports[number], number=number, finished=False)
    )
