"""Early stopping: Ray Tune's schedulers, and how the ledger's past is told to a fresh one.

What must not live here: the ledger itself; a scheduler only sees intermediate values.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from sweeps.spec import EarlyStoppingConfig
from trainable.ray_adapter import OBJECTIVE

TIME = "epoch"
"""The result key that schedulers measure a trial's progress by."""


def make_scheduler(
    config: EarlyStoppingConfig, *, epochs: int, mode: Literal["min", "max"]
) -> TrialScheduler:
    """Build the scheduler that a spec names.

    Args:
        epochs: The budget of a full run; no rung lies beyond it.
    """
    if config.scheduler == "none":
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    return ASHAScheduler(
        time_attr=TIME,
        metric=OBJECTIVE,
        mode=mode,
        max_t=epochs,
        grace_period=config.grace_epochs,
        reduction_factor=config.reduction,
        # a run ends by its own budget; only the scheduler's choice counts as pruned
        stop_last_trials=False,
    )


@dataclass(frozen=True)
class _PastTrial:
    """What a scheduler reads of a trial."""

    trial_id: str


def replay(
    scheduler: TrialScheduler, trial_id: str, reports: Mapping[int, float], *, finished: bool
) -> bool:
    """Tell a fresh scheduler what a trial reported before, so that its rungs are what they were.

    It goes through the scheduler's front door, the calls that Tune itself makes. An unfinished
    trial must be replayed under the id that Tune gives it now: a rung then knows it and does not
    count it twice.

    Args:
        reports: The metric after each reported epoch.

    Returns:
        Whether the scheduler would stop the trial at its last report.
    """
    trial = _PastTrial(trial_id)
    told: Any = scheduler  # there is no controller and no real trial in the past; neither is read
    told.on_trial_add(None, trial)
    verdict = TrialScheduler.CONTINUE
    for epoch in sorted(reports):
        verdict = told.on_trial_result(None, trial, {TIME: epoch, OBJECTIVE: reports[epoch]})
    if finished:
        told.on_trial_remove(None, trial)
    return bool(verdict == TrialScheduler.STOP)


def stopped_trials(
    scheduler: TrialScheduler, reports: Mapping[int, Mapping[int, float]], unfinished: Set[int]
) -> frozenset[int]:
    """Return the unfinished trials that the scheduler stops at their last report.

    A driver may die between a report and carrying out the verdict on it; the verdict is then
    given anew. Earlier reports of a trial were followed by training, so the verdict on them is
    known.

    Args:
        scheduler: A fresh one, which is used up by this.
        reports: By trial, the metric after each reported epoch.
    """
    for number in sorted(reports.keys() - unfinished):
        replay(scheduler, str(number), reports[number], finished=True)
    return frozenset(
        number
        for number in sorted(unfinished)
        if replay(scheduler, str(number), reports[number], finished=False)
    )
