"""A scheduler that knows a sweep's past reports, at the start of each driver.

All of them come from the ledger, before a trial reports again. So the scheduler decides as that of
a driver that was never interrupted. What must not live here: a stopping rule (`early_stopping`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sweeps.config.spec import SweepSpec
from sweeps.early_stopping.schedulers import StopperScheduler, WouldStop, make_scheduler
from sweeps.ledger.over_seeds import origins
from sweeps.ledger.trials import TrialRecord


def replayed_scheduler(
    spec: SweepSpec, trials: Sequence[TrialRecord], saved_epoch: Callable[[int], int]
) -> StopperScheduler:
    """Return a new scheduler that has seen all reports of the search.

    A last report without its checkpoint is left out. The trial repeats the epoch and reports it
    again, and the scheduler then decides.

    Args:
        spec: The sweep.
        trials: All trials of its ledger.
        saved_epoch: Returns the epoch of the newest checkpoint of a trial; 0: it has none.
    """
    scheduler = make_scheduler(spec)
    if not scheduler.compares:
        return scheduler
    scheduler.join(origins(trials))
    for trial in trials:
        if trial.role not in ("search", "repeat"):
            continue
        past = trial.compared_reports
        # Where an exempt trial would have been stopped is in the ledger with its report.
        if trial.reports and not trial.finished and not trial.exempt:
            last = max(trial.reports)
            if last > saved_epoch(trial.number):
                past.pop(last, None)
        at, why = trial.would_stop_at, trial.would_stop_reason
        scheduler.replay(
            trial.number,
            past,
            would_stop=None if at is None else WouldStop(at, why or ""),
            repeats=trial.origin,
            place=trial.place,
        )
    return scheduler
