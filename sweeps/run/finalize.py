"""Finalize an attempt at a sweep: record its outcome, publish the best trial, deliver records.

`sweep sync`, `sweep ui` and `sweep report` draw figures and report later. What must not live here:
how weights are exported (`artifacts.export`).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sweeps.artifacts.export import Standing, export_trial
from sweeps.engine.signals import Interruption
from sweeps.errors import NO_SUCCESS
from sweeps.formatting import counted
from sweeps.ledger.attributes import Abort
from sweeps.ledger.over_seeds import weights_of
from sweeps.ledger.ranking import front_so_far
from sweeps.ledger.trials import TrialRecord, of_search
from sweeps.paths import SCRATCH
from sweeps.reconcile.failure_policy import RepeatedFailure
from sweeps.reconcile.finishing import can_offer_finish
from sweeps.recording.descriptions import DESCRIPTION, describe_sweep
from sweeps.recording.tags import (
    STOPPED_BY_INTERRUPT,
    best_tags,
    feasibility_tags,
    front_tags,
    health_tags,
)
from sweeps.run.session import SweepSession
from sweeps.stores import lost_weights
from sweeps.view.outcome import SweepFailure, SweepOutcome, Waiting, find_failure, num_retryable
from sweeps.view.sweep_view import NoBest
from tracking.notifications import Undelivered
from tracking.recorder import Recorder
from trainable.errors import StorageError

_DELIVERY_SECONDS = 60.0
"""For how long a driver waits at its end until its records are delivered."""
_DELIVERY_SECONDS_AFTER_A_SIGNAL = 5.0
_SILENCE_SECONDS = 10.0
_NOTIFICATION_SECONDS = 10.0
_NOTIFICATION_SECONDS_AFTER_A_SIGNAL = 3.0


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
    say: Callable[[str], None] = lambda _: None,
) -> SweepOutcome:
    """Record the outcome in the sweep's own run, publish the best trial, and deliver records."""
    spec, ledger, recorder = sweep.spec, sweep.ledger, sweep.recorder
    trials, best = ledger.trials(), ledger.front()
    num_searched = len(of_search(trials))
    recorder.tag(None, health_tags(trials))
    for trial in trials:  # a resume may have changed the limits
        if trial.finished and (tags := feasibility_tags(trial)):
            recorder.tag(trial.number, tags)
    known = sweep.trials()
    left, stop = known.num_left, known.stop
    published = _Published()
    failure = _failure(abort_reason, left, best, trials)
    if abort_reason is not None and failure is not None and failure.is_aborted:
        ledger.store_abort(
            Abort(abort_reason.key, failure.cause, abort_reason.numbers[-1], failure.kind or "")
        )
    elif failure is not None and stop:
        cause = f"{failure.cause} before {stop.key} ended the sweep: {stop.why}"
        failure = replace(failure, cause=cause)
    why = failure.cause if failure else stop.why if stop else None
    description = {DESCRIPTION: describe_sweep(trials, best, spec, why)}
    if interruption.requested:
        recorder.finish(None, "INTERRUPTED", STOPPED_BY_INTERRUPT)
    elif sweep.only_extra and left:
        # The search was interrupted before, and still is.
        recorder.finish(None, "INTERRUPTED", STOPPED_BY_INTERRUPT)
    elif failure is not None:
        recorder.finish(None, "FAILED", {"reason": failure.cause, **description})
    else:
        if len(spec.metrics) > 1:
            # No weights are published, because the user chooses among these trials.
            for number, tags in front_tags(best, trials).items():
                recorder.tag(number, tags)
            lost = lost_weights(sweep.paths, spec, [weights_of(one, trials) for one in best])
            published = _Published(missing_weights=lost)
        else:
            say("exporting the best weights")
            published = _publish_best(sweep, best[0], trials)
        stopped = {"stopped_by": stop.key} if stop else {}
        recorder.finish(None, "FINISHED", stopped | description)
    _record_series(sweep)
    pending = _deliver(sweep.recorder, interruption, say)
    undelivered = _deliver_notifications(sweep, interruption)
    code = interruption.exit_code or (NO_SUCCESS if failure else 0)
    if not interruption.requested and not left and published.pending_weights is None:
        ledger.mark_published()
    shown = front_so_far(trials, ledger.minimizes) if left else best
    return SweepOutcome(
        exit_code=code,
        metrics=spec.metrics,
        best=shown,
        num_retryable=num_retryable(spec, trials),
        can_finish=len(shown) == 1 and can_offer_finish(spec, shown[0], trials),
        lost_weights=published.missing_weights,
        num_trials=num_searched,
        max_trials=spec.max_trials(2 * num_searched),
        num_left=left,
        stop=stop,
        failure=failure,
        waiting=Waiting(
            records=pending, weights=published.pending_weights, notifications=undelivered
        ),
    )


def _record_series(sweep: SweepSession) -> None:
    """Record what a series of extra trials says, in the runs of the trials that it speaks of."""
    known = sweep.trials()
    series, trials = known.series, known.trials
    if series is None:
        return
    for number, tags in series.tags(trials).items():
        sweep.recorder.tag(number, tags)
    for number, row in series.rows(trials).items():
        sweep.recorder.log(number, [row])


def _failure(
    abort_reason: RepeatedFailure | None,
    left: int,
    best: Sequence[TrialRecord],
    trials: Sequence[TrialRecord],
) -> SweepFailure | None:
    """Return why the sweep failed; a failure that prevented no trial does not count."""
    if abort_reason is not None and (left or not best):
        kind = abort_reason.failure.kind
        return SweepFailure(abort_reason.cause, abort_reason.numbers[-1], kind, is_aborted=True)
    return None if best else find_failure(trials)


def _deliver(recorder: Recorder, interruption: Interruption, say: Callable[[str], None]) -> int:
    """Wait until the tracking server has all records, or the time limit is reached."""
    say("delivering to the tracking store")
    started = time.monotonic()
    deadline = started + _DELIVERY_SECONDS
    while (left := deadline - time.monotonic()) > 0 and (
        waiting := recorder.flush(min(left, 0.2))
    ):
        say(f"delivering {counted(waiting, 'record')} to the tracking store")
        now = time.monotonic()
        # End before the grace period does; the next resume delivers the rest.
        if interruption.requested:
            soon = min(_DELIVERY_SECONDS_AFTER_A_SIGNAL, interruption.left - 1.0)
            deadline = min(deadline, now + soon)
        # `seconds_unresponsive` is infinite if this process delivers to no server.
        waited = now - started if recorder.seconds_unresponsive < math.inf else math.inf
        if min(recorder.seconds_unresponsive, waited) > _SILENCE_SECONDS:
            deadline = now  # the server is unavailable
    left = deadline - time.monotonic()
    return recorder.close(timeout=max(left, 0.0))


def _deliver_notifications(sweep: SweepSession, interruption: Interruption) -> Undelivered | None:
    """Give the webhook a last, bounded time; returns what still waits, None if nothing does."""
    if sweep.notifications is None:
        return None
    seconds = _NOTIFICATION_SECONDS
    if interruption.requested:
        seconds = max(min(_NOTIFICATION_SECONDS_AFTER_A_SIGNAL, interruption.left - 1.0), 0.0)
    undelivered = sweep.notifications.delivery.close(seconds)
    return undelivered if undelivered.waiting else None


def _publish_best(sweep: SweepSession, best: TrialRecord, trials: list[TrialRecord]) -> _Published:
    """Add the best trial's weights, configuration and model card to the sweep's run."""
    paths, ledger, recorder = sweep.paths, sweep.ledger, sweep.recorder
    recorder.tag(None, best_tags(best))
    with tempfile.TemporaryDirectory(dir=paths.directory, prefix=SCRATCH) as directory:
        try:
            files = export_trial(
                paths,
                sweep.spec,
                weights_of(best, trials),
                Path(directory, "best"),
                Standing.of(ledger.attempts, trials),
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
