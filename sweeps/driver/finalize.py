"""Finalize an attempt at a sweep: record its outcome, publish the best trial, deliver records.

Figures and the report are drawn later, by `sweep sync`, `sweep ui` and `sweep report`. What must
not live here: how weights are exported (`publishing`).
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from sweeps.driver.session import SweepSession
from sweeps.engine.signals import Interruption
from sweeps.exit_codes import NO_SUCCESS
from sweeps.ledger.ledger import TrialRecord
from sweeps.ledger.reader import of_search
from sweeps.paths import SCRATCH
from sweeps.policies.failure_policy import RepeatedFailure
from sweeps.publishing.export import export_trial
from sweeps.reconciliation.finishing import can_offer_finish
from sweeps.recording.tags import (
    STOPPED_BY_INTERRUPT,
    attempt_tags,
    best_tags,
    front_tags,
    health_tags,
)
from sweeps.results.sweep_status import NoBest, SweepOutcome, failure_cause
from tracking.tracker import BackgroundDelivery
from trainable.errors import StorageError

_DELIVERY_SECONDS = 60.0
_DELIVERY_SECONDS_AFTER_A_SIGNAL = 5.0
_SILENCE_SECONDS = 10.0


class _Published(NamedTuple):
    """Which parts of the publication are missing, and why."""

    pending_weights: str | None = None
    """Why the best weights are not published yet: the object store is unavailable."""
    missing_weights: str | None = None
    """Why there are no best weights."""


def finalize_attempt(
    sweep: SweepSession,
    interruption: Interruption,
    abort_reason: RepeatedFailure | None,
) -> SweepOutcome:
    """Record the outcome in the sweep's own run, publish the best trial, and deliver records.

    Args:
        sweep: The open sweep.
        interruption: Whether the driver must exit.
        abort_reason: The repeated failure for which the sweep stopped itself; None otherwise.

    Returns:
        The outcome that the command prints, with its exit code.
    """
    spec, ledger, recorder = sweep.spec, sweep.ledger, sweep.recorder
    trials, best = ledger.trials(), ledger.front()
    num_searched = len(of_search(trials))
    recorder.tag(None, health_tags(trials))
    left, stop = sweep.num_remaining, sweep.stopped
    failed: int | None = None
    cause: str | None = None
    published = _Published()
    if abort_reason and (left or not best):  # otherwise the stop prevented no trial
        failed, cause = abort_reason.numbers[-1], abort_reason.cause
    elif not best:
        failed, cause = failure_cause(trials)
        if stop:
            cause = f"{cause} before {stop.key} ended the sweep: {stop.why}"
    if interruption.requested:
        recorder.finish(None, "INTERRUPTED", STOPPED_BY_INTERRUPT)
    elif cause is not None:
        recorder.finish(None, "FAILED", {"reason": cause})
    else:
        if len(spec.metrics) > 1:
            # No weights are published, because the user chooses among these trials.
            for number, tags in front_tags(best, trials).items():
                recorder.tag(number, tags)
        else:
            published = _publish_best(sweep, best[0], trials)
        recorder.finish(None, "FINISHED", {"stopped_by": stop.key} if stop else {})
    pending = _deliver(sweep.delivery, interruption)
    code = interruption.exit_code or (NO_SUCCESS if cause else 0)
    if not interruption.requested and not left and published.pending_weights is None:
        ledger.mark_published()
    return SweepOutcome(
        code,
        best,
        num_searched,
        pending,
        left,
        cause,
        failed,
        spec.metrics,
        stop,
        spec.max_trials(2 * num_searched),
        published.pending_weights,
        published.missing_weights,
        len(best) == 1 and can_offer_finish(spec, best[0], trials),
    )


def _deliver(delivery: BackgroundDelivery, interruption: Interruption) -> int:
    """Wait until the tracking server has all records, or the time limit is reached.

    After an interruption, the wait ends before the grace period does. The next resume delivers
    the remaining records.

    Returns:
        How many records remain in the outbox.
    """
    started = time.monotonic()
    deadline = started + _DELIVERY_SECONDS
    while (left := deadline - time.monotonic()) > 0 and delivery.flush(min(left, 0.2)):
        now = time.monotonic()
        if interruption.requested:
            soon = min(_DELIVERY_SECONDS_AFTER_A_SIGNAL, interruption.left - 1.0)
            deadline = min(deadline, now + soon)
        # `seconds_unresponsive` is infinite if this process delivers to no server.
        waited = now - started if delivery.seconds_unresponsive < math.inf else math.inf
        if min(delivery.seconds_unresponsive, waited) > _SILENCE_SECONDS:
            deadline = now  # the server is unavailable
    left = deadline - time.monotonic()
    return delivery.close(timeout=max(left, 0.0))


def _publish_best(sweep: SweepSession, best: TrialRecord, trials: list[TrialRecord]) -> _Published:
    """Add the best trial's weights, configuration and model card to the sweep's run."""
    paths, ledger, recorder = sweep.paths, sweep.ledger, sweep.recorder
    recorder.tag(None, best_tags(best))
    with tempfile.TemporaryDirectory(dir=paths.directory, prefix=SCRATCH) as directory:
        try:
            files = export_trial(
                paths,
                sweep.spec,
                best,
                Path(directory, "best"),
                attempt_tags(ledger.attempts),
                sum(trial.finished for trial in trials),
            )
        except NoBest as error:
            recorder.tag(None, {"best_checkpoint": f"missing: {error}"})
            return _Published(missing_weights=str(error))
        except StorageError as error:  # the trials are complete: the sweep does not fail
            recorder.tag(None, {"best_checkpoint": f"waiting: {error}"})
            return _Published(pending_weights=str(error))
        for file in files:
            recorder.artifact(None, file, f"best/{file.name}")
    if len(ledger.attempts) > 1:  # an earlier attempt may have set the tag
        recorder.tag(None, {"best_checkpoint": ""})
    return _Published()
