"""Finalize an attempt at a sweep: record its outcome, publish the best trial, and deliver.

What must not live here: how weights, figures and reports are made (`publishing`).
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
from tracking.recorder import Recorder
from tracking.tracker import BackgroundDelivery
from trainable.errors import StorageError

ReportWriter = Callable[[SweepPaths, Path], Path]
"""Writes a sweep's report into a file, as `draw_report` does."""

_DELIVERY_SECONDS = 60.0
_DELIVERY_SECONDS_AFTER_A_SIGNAL = 5.0
_SILENCE_SECONDS = 10.0
_FIGURES_SHARE, _FIGURES_SECONDS = 0.1, (2.0, 15.0)
"""How long to wait for figures of trials once weights and report are published: a share of the
attempt's duration, and its bounds. Two seconds draw the figures of about thirty trials, so a sweep
of seconds does not take twice as long.
"""


class _Published(NamedTuple):
    """The parts of a publication that are missing."""

    num_missing_figures: int = 0
    """Trials whose figures were not drawn in time."""
    pending_weights: str | None = None
    """Why the best weights are not published yet: the object store is unavailable."""
    missing_weights: str | None = None
    """Why there are no best weights."""


def finalize_attempt(
    sweep: SweepSession,
    figures: FigureWorkerPool,
    interruption: Interruption,
    abort_reason: RepeatedFailure | None,
    write_report: ReportWriter = draw_report,
) -> SweepOutcome:
    """Record the attempt's outcome in the sweep's own run, publish the best trial, and deliver.

    Args:
        sweep: The open sweep.
        figures: Draws the trials' figures.
        interruption: Whether the driver must exit.
        abort_reason: The repeated failure for which the sweep stopped itself; None otherwise.
        write_report: Writes the sweep's report.

    Returns:
        The outcome that the command prints, with its exit code.
    """
    spec, ledger, recorder = sweep.spec, sweep.ledger, sweep.recorder
    trials, best = ledger.trials(), ledger.front()
    recorder.tag(None, health_tags(trials))
    left, stop = sweep.num_remaining, sweep.stopped
    failed: int | None = None
    cause: str | None = None
    published = _Published()
    if abort_reason and (left or not best):  # otherwise the stop spared no trial
        failed, cause = abort_reason.numbers[-1], abort_reason.cause
    elif not best:
        failed, cause = failure_cause(trials)
        if stop:
            cause = f"{cause} before {stop.key} ended the sweep: {stop.why}"
    if interruption.requested:
        recorder.finish(None, "INTERRUPTED", STOPPED_BY_INTERRUPT)
    elif cause is not None:
        figures.flush_now()
        _publish_report(sweep.paths, recorder, write_report)
        published = _Published(figures.finish(_figure_timeout(figures)))
        recorder.finish(None, "FAILED", {"reason": cause})
    else:
        if len(spec.metrics) > 1:
            published = _publish_front(sweep, best, trials, figures, write_report)
        else:
            published = _publish_best(sweep, best[0], trials, figures, write_report)
        recorder.finish(None, "FINISHED", {"stopped_by": stop.key} if stop else {})
    pending = _deliver(sweep.delivery, interruption)
    code = interruption.exit_code or (NO_SUCCESS if cause else 0)
    if not interruption.requested and not left and published.pending_weights is None:
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
        published.pending_weights,
        published.missing_weights,
        published.num_missing_figures,
    )


def _deliver(delivery: BackgroundDelivery, interruption: Interruption) -> int:
    """Wait for a limited time until the tracking server has everything.

    After an interruption the wait also ends before the grace period does. The next resume delivers
    what remains.

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
        # Infinite: this process delivers to no server.
        waited = now - started if delivery.seconds_unresponsive < math.inf else math.inf
        if min(delivery.seconds_unresponsive, waited) > _SILENCE_SECONDS:
            deadline = now  # the server is unavailable
    left = deadline - time.monotonic()
    return delivery.close(timeout=max(left, 0.0))


def _publish_front(
    sweep: SweepSession,
    front: list[TrialRecord],
    trials: list[TrialRecord],
    figures: FigureWorkerPool,
    write_report: ReportWriter,
) -> _Published:
    """Tag the trials of the Pareto front, and publish the report and figures.

    No weights are published, because the user chooses among these trials.
    """
    for number, tags in front_tags(front, trials).items():
        sweep.recorder.tag(number, tags)
    ranked = [trial.number for trial in front]
    figures.flush_now(ranked)
    _publish_report(sweep.paths, sweep.recorder, write_report)
    return _Published(figures.finish(_figure_timeout(figures), ranked))


def _figure_timeout(figures: FigureWorkerPool) -> float:
    least, most = _FIGURES_SECONDS
    return min(max(least, _FIGURES_SHARE * figures.age), most)


def _publish_best(
    sweep: SweepSession,
    best: TrialRecord,
    trials: list[TrialRecord],
    figures: FigureWorkerPool,
    write_report: ReportWriter,
) -> _Published:
    """Add the best trial's weights, configuration, model card and figures to the sweep's run."""
    pending: str | None = None
    missing: str | None = None
    paths, ledger, recorder = sweep.paths, sweep.ledger, sweep.recorder
    recorder.tag(None, best_tags(best))
    with (
        tempfile.TemporaryDirectory(dir=paths.directory, prefix=EXPORT) as directory,
        ThreadPoolExecutor() as executor,  # child processes import for seconds
    ):
        weights = executor.submit(
            export_trial,
            paths,
            sweep.spec,
            best,
            Path(directory, "best"),
            attempt_tags(ledger.attempts),
            sum(trial.finished for trial in trials),
        )
        report = executor.submit(_publish_report, paths, recorder, write_report)
        ranked = _ranked(trials, best, ledger.minimize)
        figures.flush_now(ranked)
        wait((weights,))
        wait((report,))
        num_missing_figures = figures.finish(_figure_timeout(figures), ranked)
        for figure in figures.pictures(best.number):
            recorder.artifact(None, figure, f"figures/{figure.name}")
        try:
            for file in weights.result():
                recorder.artifact(None, file, f"best/{file.name}")
        except NoBest as error:
            missing = str(error)
            recorder.tag(None, {"best_checkpoint": f"missing: {missing}"})
        except StorageError as error:  # the trials are complete, and so is the sweep
            pending = str(error)
            recorder.tag(None, {"best_checkpoint": f"waiting: {pending}"})
        else:
            if len(ledger.attempts) > 1:  # an earlier attempt may have set the tag
                recorder.tag(None, {"best_checkpoint": ""})
        report.result()
    return _Published(num_missing_figures, pending, missing)


def _ranked(trials: list[TrialRecord], best: TrialRecord, minimize: bool) -> list[int]:
    """Return the best trial's number, then those of all trials with a value, the best first."""
    sign = 1 if minimize else -1
    valued = [(sign * one.value, one.number) for one in trials if one.value is not None]
    return [best.number, *(number for _, number in sorted(valued))]


def _publish_report(paths: SweepPaths, recorder: Recorder, write_report: ReportWriter) -> None:
    """Add the sweep's report to its own run."""
    with tempfile.TemporaryDirectory(dir=paths.directory, prefix=EXPORT) as directory:
        try:
            file = write_report(paths, Path(directory, "report.html"))
        except NoReport as missing:
            recorder.tag(None, {"report": f"missing: {missing}"})
        else:
            recorder.artifact(None, file, "report.html")
