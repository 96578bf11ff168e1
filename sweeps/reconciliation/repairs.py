"""Carrying out corrections, each by the owner of what is wrong.

What must not live here: deciding what is wrong (`reconcile`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from sweeps.checkpoint_locations import trial_files
from sweeps.config.logged_params import searched, trial_parameters
from sweeps.config.spec import SpecError, SweepSpec
from sweeps.early_stopping.pbt_exploit import without_unbegun
from sweeps.ledger.ledger import Ledger, TrialRecord
from sweeps.paths import TRIAL_CONFIG, LedgerError, SweepPaths
from sweeps.reconciliation.reconcile import (
    STATUSES,
    Correction,
    MissingMetrics,
    MissingParams,
    MissingReport,
    MissingRun,
    MissingTrials,
    OrphanedRun,
    StaleRunStatus,
    StaleWriter,
    UncountedAttempt,
    UnknownDirectory,
    UnrecordedEnd,
)
from sweeps.recording.downsampling import thin_rows
from sweeps.recording.tags import STOPPED_BY_INTERRUPT, end_tags, status_tags
from sweeps.recording.trial_config import read_config
from sweeps.search.suggest import Suggester
from tracking.recorder import Recorder
from trainable.errors import StorageError, WriterReplaced
from trainable.files import RunFiles
from trainable.metrics_file import logged_files, read_logged, read_rows


class UnknownDirectoryInTheWay(ValueError):
    """A directory holds the place of a trial that is still to come."""


def apply(
    corrections: Iterable[Correction],
    paths: SweepPaths,
    spec: SweepSpec,
    ledger: Ledger,
    recorder: Recorder,
    *,
    warn: Callable[[str], None] = lambda _: None,
) -> None:
    """Put right what is wrong; each correction may be carried out any number of times.

    Args:
        warn: Told of what is only named.

    Raises:
        LedgerError: The ledger lost trials.
        StrangerInTheWay: A new trial would find files that are not its own.
    """
    corrections = list(corrections)
    for wrong in corrections:  # what forbids going on, before anything is changed
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
                # Also what it trained after its last report: no later start would deliver it.
                directory = paths.trial(number)
                rows = thin_rows(read_rows(directory), spec.tracking.every, ended=True)
                own = [row for _, row in read_logged(directory)]
                told = StaleRunStatus(number, STATUSES[ending], (*own, *rows))
                send_to_tracker(told, paths, spec, record, recorder)
            case MissingRun() | StaleRunStatus() | OrphanedRun():
                send_to_tracker(wrong, paths, spec, ledger.trial(wrong.number), recorder)
            case MissingReport() | MissingMetrics():
                backfill([wrong], ledger, recorder)


def send_to_tracker(
    wrong: MissingRun | MissingMetrics | StaleRunStatus | OrphanedRun,
    paths: SweepPaths,
    spec: SweepSpec,
    record: TrialRecord,
    recorder: Recorder,
) -> None:
    """Give tracking what it lacks of a trial that nobody works on."""
    match wrong:
        case MissingRun(number, at_ms):
            record = without_unbegun(record, paths)  # who goes on is told of it at the start
            parameters = told_parameters(paths, spec, record)
            recorder.start(number, parameters, status_tags(record), at_ms=at_ms)
        case MissingMetrics(number, rows):
            recorder.log(number, rows)
        case StaleRunStatus(number, status, rows):
            recorder.log(number, rows)
            for file, name in logged_files(paths.trial(number)):
                recorder.artifact(number, file, name)
            # Where the ledger was told may be another time zone.
            ends = [*(row.timestamp_ms for row in rows[-1:]), record.ended_ms or 0]
            at_ms = min(max(ends), time.time_ns() // 1_000_000) or None
            recorder.finish(number, status, end_tags(record, spec), at_ms=at_ms)
        case OrphanedRun(number, at_ms):
            recorder.finish(number, "INTERRUPTED", STOPPED_BY_INTERRUPT, at_ms=at_ms)


def backfill(
    corrections: Iterable[MissingReport | MissingMetrics], ledger: Ledger, recorder: Recorder
) -> None:
    """Give ledger and tracking what the store has of a trial that goes on."""
    for wrong in corrections:
        match wrong:
            case MissingReport(number, report):
                ledger.report(number, **report._asdict())
            case MissingMetrics(number, rows):
                recorder.log(number, rows)


def close_store(files: RunFiles) -> None:
    """Remove what a worker was writing with that was killed: nobody opens this trial again."""
    if files.has_writer():
        files.open()
        files.close()


def close_stores(trials: Iterable[RunFiles]) -> None:
    """Close what workers left open that were killed; none of them may live any more.

    Where the storage refuses, it is left to whoever goes on with the trial: there is something
    worse to be told.
    """
    for trial in trials:
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


def told_parameters(paths: SweepPaths, spec: SweepSpec, record: TrialRecord) -> dict[str, object]:
    """Return with what a trial began: the spec may have been changed since."""
    try:
        config = read_config(paths.trial(record.number) / TRIAL_CONFIG)
    except (OSError, ValueError):
        try:
            config = spec.trial_config(record.number, record.params)
        except SpecError:  # nor do its parameters fit the spec any more
            return searched(record.params)
    return trial_parameters(config, record.params)
