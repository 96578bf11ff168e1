"""Delivering what a sweep's outbox still holds, and what its end did not wait for, without
running the sweep.

What must not live here: the delivery itself (`tracking`), and a running sweep's, which is its
driver's business.
"""

from __future__ import annotations

from typing import NamedTuple

from sweeps.engine.orphans import end_orphans
from sweeps.layout import SweepPaths, tracking_place
from sweeps.ledger.place import check_kept, place_of
from sweeps.ledger.view import LedgerView
from sweeps.lock import SweepLock
from sweeps.publishing.pictures import Gallery, undrawn
from sweeps.reconciliation.corrections import tell
from sweeps.reconciliation.facts import gather
from sweeps.reconciliation.reconcile import untold
from sweeps.recording.tags import STOPPED_BY_INTERRUPT
from sweeps.results.sweep_view import SweepView
from sweeps.spec.spec import SweepSpec
from tracking.mlflow_recorder import MlflowRecorder, sync
from tracking.outbox_status import read_outbox
from tracking.probe import probe


class Synced(NamedTuple):
    """What became of a sweep's waiting records."""

    delivered: int
    left: int
    refused: int
    """How many the server has refused for good, ever."""
    held: str | None
    """How many artifacts wait although the server answers, and why."""
    drawn: int
    """How many trials have pictures that had none."""


def deliver(view: SweepView, *, patience: float = 30.0) -> Synced:
    """Deliver a sweep's waiting records, what a driver that was killed could not tell, and the
    pictures of trials that are not drawn yet.

    Args:
        view: The sweep, as it was found.
        patience: Seconds without a single delivery after which it gives up.

    Raises:
        StorageMoved: It is a copy of a sweep, or one that was renamed.
        SweepHeld: A driver runs the sweep, and delivers by itself.
        TrackingUnusable: The tracking server does not answer, or refuses.
    """
    paths = view.paths
    check_kept(paths, view.spec, view.spec)
    uri, artifacts = tracking_place(view.spec.tracking.uri, paths.root)
    lock = SweepLock(paths.lock, view.place.lock())
    lock.acquire()
    try:
        if lock.previous is not None:
            end_orphans(lock.previous.token)
        tell_who_is_interrupted(paths, view.spec)
        drawn = draw_what_is_missing(paths, view.spec)
        before = read_outbox(paths.outbox)
        if before.pending:
            probe(uri, known=view.spec.tracking.uri is None)
        left = sync(
            uri,
            artifacts,
            view.spec.name,
            view.ledger.sweep_id,
            paths.outbox,
            patience=patience,
        )
    finally:
        lock.release()
    after = read_outbox(paths.outbox)
    gone = after.refused - before.refused
    return Synced(before.pending - left - gone, left, after.refused, after.held, drawn)


def tell_who_is_interrupted(paths: SweepPaths, spec: SweepSpec) -> None:
    """Queue what tracking was not told of because the driver was killed: runs of trials that
    nobody works on are no longer running, and neither is the sweep's own. The caller holds the
    lock.
    """
    ledger = LedgerView(place_of(paths, spec))
    records = {record.number: record for record in ledger.records()}
    wrong = list(untold(gather(paths, spec, list(records.values()), live=False)))
    looks_live = read_outbox(paths.outbox).sweep_told == "RUNNING"
    if not wrong and not looks_live:
        return
    recorder = _queue(paths, spec, ledger.sweep_id)
    for one in wrong:
        tell(one, paths, spec, records[one.number], recorder)
    if looks_live:
        recorder.finish(None, "INTERRUPTED", STOPPED_BY_INTERRUPT)
    recorder.close(0.0)


def draw_what_is_missing(paths: SweepPaths, spec: SweepSpec) -> int:
    """Draw the trials whose pictures the sweep's end did not wait for, and queue these; the best
    trial's for the sweep's own run, too; return how many trials it drew. The caller holds the
    lock.
    """
    ledger = LedgerView(place_of(paths, spec))
    if not (trials := undrawn(paths, ledger.trials)):
        return 0
    recorder = _queue(paths, spec, ledger.sweep_id)
    with Gallery(spec, paths, trials, recorder) as gallery:
        gallery.finish()
    best = ledger.best() if len(spec.metrics) == 1 else None
    # At its end the sweep put the best trial's on its own run, if they were drawn by then.
    if best in trials and best is not None and ledger.concluded == len(ledger.trials):
        for picture in gallery.pictures(best.number):
            recorder.artifact(None, picture, f"figures/{picture.name}")
    recorder.close(0.0)
    return len(trials) - len(undrawn(paths, trials))


def _queue(paths: SweepPaths, spec: SweepSpec, sweep_id: str) -> MlflowRecorder:
    """A recorder that fills the outbox and asks no server."""
    return MlflowRecorder(
        tracking_place(spec.tracking.uri, paths.root)[0],
        None,
        spec.name,
        sweep_id,
        paths.outbox,
        {},
        {},
        announce=False,
        offline=True,
    )
