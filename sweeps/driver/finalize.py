"""The end of an attempt at a sweep: what it came to, published and delivered.

What must not live here: what weights, pictures and reports are made of (`results`, `pictures`).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from sweeps.driver.session import SweepSession
from sweeps.driver.shutdown import EXPORT
from sweeps.engine.signals import Interruption
from sweeps.exit_codes import NO_SUCCESS
from sweeps.ledger.ledger import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.policies.failure_policy import RepeatedFailure
from sweeps.publishing.export import NoReport, draw_report, export_trial
from sweeps.publishing.figure_worker import FigureWorkerPool
from sweeps.recording.tags import (
    STOPPED_BY_INTERRUPT,
    attempt_tags,
    best_tags,
    front_tags,
    health_tags,
)
from sweeps.results.sweep_status import NoBest, SweepOutcome, failure_cause
from tracking.mlflow_recorder import MlflowRecorder
from tracking.recorder import Recorder
from trainable.errors import StorageError

ReportWriter = Callable[[SweepPaths, Path], Path]
"""Writes a sweep's report into a file, as `draw_report` does."""

_DELIVERY_SECONDS = 60.0
_DELIVERY_SECONDS_AFTER_A_SIGNAL = 5.0
_SILENCE_SECONDS = 10.0
_PICTURES_SHARE, _PICTURES_SECONDS = 0.1, (2.0, 15.0)
"""What the end waits for pictures of trials, once weights and report are there: a share of the
time that this attempt took, and at least and at most. After a sweep of seconds nobody wants to
wait for them as long as for the sweep; two seconds draw those of some thirty trials.
"""


class _Published(NamedTuple):
    """What of a sweep's end is not there yet, or never will be."""

    undrawn: int = 0
    """Trials that were not waited for until their pictures were drawn."""
    waiting: str | None = None
    """Why the best weights have to wait, for an object store that is away."""
    lost: str | None = None
    """Why there are none."""


def finalize_attempt(
    sweep: SweepSession,
    gallery: FigureWorkerPool,
    interruption: Interruption,
    abort_reason: RepeatedFailure | None,
    write_report: ReportWriter = draw_report,
) -> SweepOutcome:
    """Tell the sweep's own run how it ended, publish what is best, and deliver what waits.

    Args:
        gallery: Has the trials' pictures.
        interruption: Whether the driver is to leave.
        abort_reason: Why the sweep stopped by its own decision; None when it did not.
        write_report: Writes the sweep's report.
    """
    spec, ledger, recorder = sweep.spec, sweep.ledger, sweep.recorder
    trials, best = ledger.trials(), ledger.front()
    recorder.tag(None, health_tags(trials))
    left, stop = sweep.num_remaining, sweep.stopped
    failed: int | None = None
    cause: str | None = None
    published = _Published()
    if abort_reason and (left or not best):  # else nobody was saved by it
        failed, cause = abort_reason.numbers[-1], abort_reason.cause
    elif not best:
        failed, cause = failure_cause(trials)
        if stop:
            cause = f"{cause} before {stop.key} ended the sweep: {stop.why}"
    if interruption.requested:
        recorder.finish(None, "INTERRUPTED", STOPPED_BY_INTERRUPT)
    elif cause is not None:
        gallery.flush_now()
        _publish_report(sweep.paths, recorder, write_report)
        published = _Published(gallery.finish(_patience(gallery)))
        recorder.finish(None, "FAILED", {"reason": cause})
    else:
        if len(spec.metrics) > 1:
            published = _publish_front(sweep, best, trials, gallery, write_report)
        else:
            published = _publish_best(sweep, best[0], trials, gallery, write_report)
        recorder.finish(None, "FINISHED", {"stopped_by": stop.key} if stop else {})
    pending = _deliver(sweep.tracking, interruption)
    code = interruption.exit_code or (NO_SUCCESS if cause else 0)
    if not interruption.requested and not left and published.waiting is None:
        ledger.mark_published()
    return SweepOutcome(
        code,
        best,
        len(trials),
        pending,
        left,
        cause,
        failed,
        spec.metrics,
        stop,
        spec.max_trials(2 * len(trials)),
        published.waiting,
        published.lost,
        published.undrawn,
    )


def _deliver(tracking: MlflowRecorder, interruption: Interruption) -> int:
    """Wait until the tracking server has everything, but not for ever, and after an interruption
    only as long as there is time; what is left is delivered by the next resume.
    """
    started = time.monotonic()
    deadline = started + _DELIVERY_SECONDS
    while (left := deadline - time.monotonic()) > 0 and tracking.flush(min(left, 0.2)):
        now = time.monotonic()
        if interruption.requested:
            soon = min(_DELIVERY_SECONDS_AFTER_A_SIGNAL, interruption.left - 1.0)
            deadline = min(deadline, now + soon)
        waited = (
            now - started if tracking.seconds_unresponsive < math.inf else math.inf
        )  # asking nobody
        if min(tracking.seconds_unresponsive, waited) > _SILENCE_SECONDS:
            deadline = now  # nobody should wait for a server that is not there
    left = deadline - time.monotonic()
    return tracking.close(timeout=max(left, 0.0))


def _publish_front(
    sweep: SweepSession,
    front: list[TrialRecord],
    trials: list[TrialRecord],
    gallery: FigureWorkerPool,
    write_report: ReportWriter,
) -> _Published:
    """Say which trials the Pareto front is. No weights are published: which of these trials is
    wanted is the user's choice.
    """
    for number, tags in front_tags(front, trials).items():
        sweep.recorder.tag(number, tags)
    ranked = [trial.number for trial in front]
    gallery.flush_now(ranked)
    _publish_report(sweep.paths, sweep.recorder, write_report)
    return _Published(gallery.finish(_patience(gallery), ranked))


def _patience(gallery: FigureWorkerPool) -> float:
    least, most = _PICTURES_SECONDS
    return min(max(least, _PICTURES_SHARE * gallery.age), most)


def _publish_best(
    sweep: SweepSession,
    best: TrialRecord,
    trials: list[TrialRecord],
    gallery: FigureWorkerPool,
    write_report: ReportWriter,
) -> _Published:
    """Put the best trial's weights, configuration, card and pictures on the sweep's own run."""
    away: str | None = None
    lost: str | None = None
    paths, ledger, recorder = sweep.paths, sweep.ledger, sweep.recorder
    recorder.tag(None, best_tags(best))
    with (
        tempfile.TemporaryDirectory(dir=paths.directory, prefix=EXPORT) as directory,
        ThreadPoolExecutor() as beside,  # child processes that import for seconds
    ):
        weights = beside.submit(
            export_trial,
            paths,
            sweep.spec,
            best,
            Path(directory, "best"),
            attempt_tags(ledger.attempts),
            sum(trial.finished for trial in trials),
        )
        report = beside.submit(_publish_report, paths, recorder, write_report)
        ranked = _ranked(trials, best, ledger.minimize)
        gallery.flush_now(ranked)
        wait((weights,))
        wait((report,))
        undrawn = gallery.finish(_patience(gallery), ranked)
        for picture in gallery.pictures(best.number):
            recorder.artifact(None, picture, f"figures/{picture.name}")
        try:
            for file in weights.result():
                recorder.artifact(None, file, f"best/{file.name}")
        except NoBest as missing:
            lost = str(missing)
            recorder.tag(None, {"best_checkpoint": f"missing: {lost}"})
        except StorageError as problem:  # the trials are complete; so is the sweep
            away = str(problem)
            recorder.tag(None, {"best_checkpoint": f"waiting: {away}"})
        else:
            if len(ledger.attempts) > 1:  # an earlier one may have said otherwise
                recorder.tag(None, {"best_checkpoint": ""})
        report.result()
    return _Published(undrawn, away, lost)


def _ranked(trials: list[TrialRecord], best: TrialRecord, minimize: bool) -> list[int]:
    """The best trial's number, and then those of all that have a value, the better ones first."""
    sign = 1 if minimize else -1
    valued = [(sign * one.value, one.number) for one in trials if one.value is not None]
    return [best.number, *(number for _, number in sorted(valued))]


def _publish_report(paths: SweepPaths, recorder: Recorder, write_report: ReportWriter) -> None:
    """Put the sweep's report on its own run."""
    with tempfile.TemporaryDirectory(dir=paths.directory, prefix=EXPORT) as directory:
        try:
            file = write_report(paths, Path(directory, "report.html"))
        except NoReport as missing:
            recorder.tag(None, {"report": f"missing: {missing}"})
        else:
            recorder.artifact(None, file, "report.html")
