"""Delivering what a sweep's outbox still holds, without running the sweep.

What must not live here: the delivery itself (`tracking`), and a running sweep's, which is its
driver's business.
"""

from __future__ import annotations

from sweeps.layout import tracking_place
from sweeps.lock import SweepLock
from sweeps.orphans import end_orphans
from sweeps.results import SweepView
from tracking.mlflow_recorder import sync
from tracking.probe import probe


def deliver(view: SweepView, *, patience: float = 30.0) -> tuple[int, int]:
    """Deliver a sweep's waiting records.

    Args:
        view: The sweep, as it was found.
        patience: Seconds without a single delivery after which it gives up.

    Returns:
        How many records were delivered, and how many still wait.

    Raises:
        SweepHeld: A driver runs the sweep, and delivers by itself.
        TrackingUnusable: The tracking server does not answer, or refuses.
    """
    paths = view.paths
    uri, artifacts = tracking_place(view.spec.tracking.uri, paths.root)
    waiting = view.delivered.pending
    lock = SweepLock(paths.lock)
    lock.acquire()
    try:
        if lock.previous is not None:
            end_orphans(lock.previous.token)
        if waiting:
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
    return waiting - left, left
