"""Stop a running sweep, or end one trial for good.

What must not live here: requests to a driver (`run.stop_requests`).
"""

from __future__ import annotations

from collections.abc import Callable

from sweeps.engine.process_cleanup import end_orphans
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.reasons import BY_THE_USER
from sweeps.reconcile.collect_state import trial_state
from sweeps.reconcile.reconcile import MissingReport, unreported
from sweeps.reconcile.repairs import close_stores
from sweeps.run import stop_requests
from sweeps.run.stop_requests import StopResult
from sweeps.run.sync import queue_interruptions
from sweeps.search.pbt_exploit import without_unbegun
from sweeps.stores import check_kept, trial_files
from sweeps.sweep_lock import SweepLock
from sweeps.view.sweep_view import SweepView
from tracking.outbox_status import read_outbox


def stop(
    view: SweepView,
    *,
    trial: int | None = None,
    now: bool = False,
    seconds: float = 120.0,
    say: Callable[[str], None] = lambda _: None,
) -> StopResult:
    """Stop a running sweep, whose trials save and can resume; or end one trial."""
    paths = view.paths
    if trial is None:
        return stop_requests.stop_sweep(paths, now=now, seconds=seconds, say=say)
    if now:
        raise stop_requests.NotRunningError(
            "--now and --trial exclude each other; a trial ends at its next step; "
            "leave one of them out"
        )
    try:
        return stop_requests.stop_trial(paths, trial, seconds=seconds, say=say)
    except stop_requests.NoDriverError:
        from sweeps.run.stop import end_trial  # loads Optuna

        return end_trial(SweepView(paths), trial)


def end_trial(view: SweepView, number: int) -> StopResult:
    """End a trial that no worker trains: in the ledger first, then in the outbox.

    Reports that its last worker stored and could not deliver are added to the ledger.
    """
    paths, spec = view.paths, view.spec
    check_kept(paths, spec, spec)
    lock = SweepLock(paths.lock)
    lock.acquire()
    try:
        if lock.previous is not None:
            end_orphans(lock.previous.token)
        ledger = Ledger.open(paths.ledger)
        record = ledger.trial(number)
        state = trial_state(paths, spec, record, read_outbox(paths.outbox))
        for repair in unreported(state):
            if isinstance(repair, MissingReport):
                ledger.report(number, **repair.report._asdict())
        lineage = without_unbegun(record, paths).lineage
        record = ledger.finish(number, "pruned", reason=BY_THE_USER, lineage=lineage)
        queue_interruptions(paths, spec)
        close_stores([trial_files(paths, spec, number)])
    finally:
        lock.release()
    message = (
        f"trial {number} is {record.state} and does not resume; {SweepView(paths).resume_hint()}"
    )
    return StopResult(paths.name, number, record.finished, record.state, message)
