"""Apply the corrections of `reconcile` to ledger, store and tracking.

What must not live here: deciding what is wrong (`reconcile`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from sweeps.errors import LedgerError, SpecError
from sweeps.ledger.attributes import WOULD_STOP
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.reconcile.reconcile import (
    Correction,
    MissingParams,
    MissingReport,
    MissingRun,
    MissingTests,
    MissingTrials,
    OrphanedRun,
    StaleRunStatus,
    StaleWriter,
    SweepState,
    TrialState,
    UncountedAttempt,
    UnknownDirectory,
    UnrecordedEnd,
)
from sweeps.recording.tags import (
    STOPPED_BY_INTERRUPT,
    end_tags,
    record_configuration,
    retried_tags,
    run_status,
    status_tags,
)
from sweeps.recording.trial_config import read_config
from sweeps.search.pbt_exploit import without_unbegun
from sweeps.search.suggest import Suggester
from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import RunStart, run_start
from sweeps.stores import trial_files
from tracking.recorder import Recorder
from trainable.errors import StorageError, WriterReplaced
from trainable.store.generations import RunFiles
from trainable.store.metrics_file import logged_files, read_rows


class UnknownDirectoryInTheWay(ValueError):
    """A directory has the name that a later trial needs."""


def apply(
    corrections: Iterable[Correction],
    paths: SweepPaths,
    spec: SweepSpec,
    ledger: Ledger,
    recorder: Recorder,
    *,
    warn: Callable[[str], None] = lambda _: None,
) -> None:
    """Apply corrections; applying one repeatedly has the effect of applying it once."""
    corrections = list(corrections)
    for wrong in corrections:  # raise before anything is changed
        _refuse(wrong, paths, ledger)
    for wrong in corrections:
        match wrong:
            case UnknownDirectory():
                warn(f"{wrong}; it is left alone")
            case MissingParams(number):
                stored = ledger.trial(number).params
                ledger.complete(number, Suggester(spec, ledger).propose(number, stored))
            case UncountedAttempt(number):
                if ledger.trial(number).attempts == 0:
                    ledger.start(number)
            case StaleWriter(number):
                close_store(trial_files(paths, spec, number))
            case UnrecordedEnd(number, ending, reason):
                lineage = without_unbegun(ledger.trial(number), paths).lineage
                record = ledger.finish(number, ending, reason=reason, lineage=lineage)
                last = [row.timestamp_ms for row in read_rows(paths.trial(number))[-1:]]
                ended = StaleRunStatus(number, run_status(record), *last)
                send_to_tracker(ended, paths, spec, record, recorder)
                _record_configuration(number, spec, ledger, recorder)
            case MissingRun() | StaleRunStatus() | OrphanedRun():
                send_to_tracker(wrong, paths, spec, ledger.trial(wrong.number), recorder)
                if isinstance(wrong, StaleRunStatus):
                    _record_configuration(wrong.number, spec, ledger, recorder)
            case MissingTests(number, rows):
                recorder.log(number, rows)
            case MissingReport():
                report_missing([wrong], ledger)


def _record_configuration(
    number: int, spec: SweepSpec, ledger: Ledger, recorder: Recorder
) -> None:
    if spec.repeats.seeds > 1:
        record_configuration(ledger.trials()[ledger.trial(number).search_number], recorder)


def send_to_tracker(
    wrong: MissingRun | MissingTests | StaleRunStatus | OrphanedRun,
    paths: SweepPaths,
    spec: SweepSpec,
    record: TrialRecord,
    recorder: Recorder,
) -> None:
    """Send tracking the data that it lacks about a trial without a worker."""
    match wrong:
        case MissingRun(number, at_ms):
            # If PBT changed the trial and it has not trained since, a resume sends the change.
            record = without_unbegun(record, paths)
            start = told_start(paths, spec, record)
            recorder.start(
                number, start.params, status_tags(record, spec) | start.tags, at_ms=at_ms
            )
        case MissingTests(number, rows):
            recorder.log(number, rows)
        case StaleRunStatus(number, status, last_ms):
            follow_to_end(record, spec, recorder)
            for file, name in logged_files(paths.trial(number)):
                recorder.artifact(number, file, name)
            # Not later than now: the ledger's time may come from a host in another time zone.
            latest = max(last_ms or 0, record.ended_ms or 0)
            at_ms = min(latest, time.time_ns() // 1_000_000) or None
            recorder.finish(number, status, end_tags(record, spec, paths), at_ms=at_ms)
        case OrphanedRun(number, at_ms):
            tags = STOPPED_BY_INTERRUPT | retried_tags(record)
            recorder.finish(number, "INTERRUPTED", tags, at_ms=at_ms)


def report_missing(corrections: Iterable[MissingReport], ledger: Ledger) -> None:
    """Write a trial's stored reports to the ledger."""
    for wrong in corrections:
        report, reason = wrong.report, wrong.would_stop_reason
        if reason is not None:  # before its report, which is then not missing
            ledger.set_attr(wrong.number, WOULD_STOP, [report.epoch, reason])
        ledger.report(wrong.number, **report._asdict())


def follow_logs(state: SweepState, spec: SweepSpec, recorder: Recorder) -> None:
    """Have tracking follow the logs of the trials that have not ended, up to their reports."""
    for trial in state.trials:
        if not trial.record.finished:
            follow_log(trial, spec, recorder)


def follow_log(trial: TrialState, spec: SweepSpec, recorder: Recorder) -> None:
    """Have tracking follow a trial's log up to the last report that is stored there."""
    if trial.curve:
        recorder.follow(trial.record.number, trial.curve[-1].step, every=spec.tracking.every)


def follow_to_end(record: TrialRecord, spec: SweepSpec, recorder: Recorder) -> None:
    """Have tracking follow the log of an ended trial to its end."""
    recorder.follow(record.number, record.step, every=spec.tracking.every, ended=True)


def close_store(files: RunFiles) -> None:
    """Remove the writer directory that a killed worker left."""
    if files.has_writer():
        files.open()
        files.close()


def close_stores(trials: Iterable[RunFiles]) -> None:
    """Remove the writer directories of killed workers; none of these workers may be alive."""
    for trial in trials:
        # A resumed worker removes it, too, and the caller reports a graver error.
        with contextlib.suppress(OSError, WriterReplaced, StorageError):
            close_store(trial)


def _refuse(wrong: Correction, paths: SweepPaths, ledger: Ledger) -> None:
    match wrong:
        case MissingTrials():
            raise LedgerError(
                f"the ledger {ledger.location} is not whole: {wrong}; trials are numbered without "
                "gaps; restore it from a backup, or start a new sweep under another name"
            )
        case UnknownDirectory(directory, in_the_way=True):
            raise UnknownDirectoryInTheWay(
                f"{paths.directory / 'trials' / directory} belongs to no trial of the ledger, and "
                "a new trial would take it for its own; trials start in directories of their "
                "own; move it away"
            )


def told_start(paths: SweepPaths, spec: SweepSpec, record: TrialRecord) -> RunStart:
    """Return what a trial's run received at its start, even if the spec has changed since."""
    try:
        config = read_config(paths.trial(record.number) / TRIAL_CONFIG)
    except (OSError, ValueError):
        try:
            config = spec.trial_config(record.seed, record.params)
        except SpecError:  # the trial's parameters do not fit the changed spec either
            return RunStart(record.params, {})
    return run_start(config, record.params)
