"""Read the state of a sweep from its ledger, its trials' stores, and its tracking outbox.

This module only reads, imports neither torch nor Ray, and works in any process. What must not
live here: deciding what is wrong (`reconcile`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sweeps.ledger.trials import TrialRecord, count_trials
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.reconcile.reconcile import SavedReport, SweepState, TrialState
from sweeps.recording.tags import run_status
from sweeps.spec.spec import SweepSpec
from sweeps.stopping.metric_values import Value, as_value
from sweeps.stopping.rule import Standing, StopDecider
from sweeps.stores import trial_files, trial_store
from tracking.outbox_status import DeliveryStatus, read_outbox
from trainable.checkpoint import CheckpointStore
from trainable.errors import AllCheckpointsDamaged
from trainable.store.metrics_file import Row, read_rows
from trainable.store.notes import tested_rows


def read_sweep_state(
    paths: SweepPaths,
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    *,
    live: bool,
    judge: StopDecider | None = None,
    stop: str | None = None,
) -> SweepState:
    """Read the state of a sweep."""
    delivered = read_outbox(paths.outbox)
    trials = [trial_state(paths, spec, record, delivered) for record in records]
    if judge is not None:
        trials = _judged(trials, judge, paths, spec)
    known = {paths.trial(record.number).name for record in records}
    directory = paths.trial(0).parent
    found = directory.iterdir() if directory.is_dir() else ()
    return SweepState(
        trials=trials,
        metric=spec.metrics[0],
        select=spec.select,
        patience=spec.patience,
        parameters=frozenset(spec.search_space().unconditional()),
        strangers=sorted(entry.name for entry in found if entry.name not in known),
        num_awaited=count_trials(spec.num_trials, records, spec.repeats.seeds),
        stop=stop,
        live=live,
    )


def trial_state(
    paths: SweepPaths, spec: SweepSpec, record: TrialRecord, delivered: DeliveryStatus
) -> TrialState:
    """Read the state of one trial."""
    number, tracked_status = record.number, delivered.tracked_statuses.get(record.number)
    directory = paths.trial(number)
    stale_writer = trial_files(paths, spec, number).has_writer()
    tests = tuple(row for row in tested_rows(directory) if delivered.lacks(number, [row]))
    if record.finished and tracked_status == run_status(record):
        # Ledger and tracking both have the trial's end, and its rows were queued before its end.
        return TrialState(
            record, tracked_status=tracked_status, stale_writer=stale_writer, untold_tests=tests
        )
    rows = read_rows(directory)
    curve = _curve(rows, spec)
    if not record.finished:
        # A worker stores an epoch's row before its checkpoint. If the worker was killed in
        # between, the next worker trains and reports this epoch again.
        saved = trial_store(paths, spec, number).saved_epoch()
        curve = tuple(r for r in curve if r.epoch <= saved or r.epoch in record.reports)
    # When the trial resumes, it sends the rows after its last report itself, or trains them again.
    last = curve[-1].step if curve else 0
    kept = rows if record.finished else [row for row in rows if row.step <= last]
    return TrialState(
        record,
        curve,
        # A trial that finishes another one has rows from the beginning.
        started=(directory / TRIAL_CONFIG).exists() or (bool(rows) and record.finishes is None),
        trained=bool(curve)
        and not record.finished
        and _is_last(curve, record, spec)
        and _is_sound(trial_store(paths, spec, number), curve[-1].epoch),
        trained_past_report=len(kept) < len(rows),
        tracked_status=tracked_status,
        rows=tuple(kept),
        stale_writer=stale_writer,
        untold_tests=tests,
    )


def _judged(
    trials: Sequence[TrialState], judge: StopDecider, paths: SweepPaths, spec: SweepSpec
) -> list[TrialState]:
    compared = [trial for trial in trials if trial.record.role in ("search", "repeat")]
    reports = {trial.record.number: _compared(trial) for trial in compared}
    unfinished = {trial.record.number for trial in compared if not trial.record.finished}
    exempt = {trial.record.number for trial in compared if trial.record.exempt}
    decided = {trial.record.number for trial in compared if _is_decided(trial)}
    complete = {
        trial.record.number
        for trial in compared
        if trial.record.role == "search" and (trial.record.state == "complete" or trial.trained)
    }
    stopped = judge(Standing(reports, unfinished, decided, exempt, complete))

    def reason(number: int) -> str | None:
        last = max(reports.get(number, ()), default=0)
        # After the last epoch a trial is complete, not stopped. Without a checkpoint of its last
        # report, it trains that epoch again.
        ends = (
            number in stopped
            and last < spec.budget.reports
            and last <= trial_store(paths, spec, number).saved_epoch()
        )
        return stopped[number] if ends else None

    return [
        replace(trial, would_stop_reason=reason(trial.record.number))
        if trial.record.exempt
        else replace(trial, stop_reason=reason(trial.record.number))
        for trial in trials
    ]


def _is_decided(trial: TrialState) -> bool:
    """Return whether a driver is known to have decided on the last report of a trial."""
    record = trial.record
    # A trial that was promoted, or trained past its report, was told to continue.
    if record.promoted_at is not None and record.promoted_at == max(_compared(trial)):
        return True
    if trial.trained_past_report or not record.exempt:
        return trial.trained_past_report
    # Of an exempt trial the ledger has the report with the decision on it, or neither.
    is_known = not trial.curve or trial.curve[-1].epoch in record.reports
    return is_known or record.would_stop_at is not None


def _compared(trial: TrialState) -> dict[int, Value]:
    """Return the reports by which early stopping compares a trial, in ledger or store."""
    record = trial.record
    end = math.inf if record.would_stop_at is None else record.would_stop_at
    stored = {r.epoch: as_value((r.value, *r.others)) for r in trial.curve if r.epoch <= end}
    return stored | record.compared_reports


def _is_last(curve: Sequence[SavedReport], record: TrialRecord, spec: SweepSpec) -> bool:
    """Return whether a trial makes no report after those of its curve."""
    if curve[-1].epoch >= spec.budget.reports:
        return True
    reports = {report.epoch: report.value for report in curve} | record.reports
    return spec.patience is not None and bool(spec.patience.reason(reports, spec.metrics[0]))


def _is_sound(store: CheckpointStore, epochs: int) -> bool:
    try:
        newest = store.newest()
    except AllCheckpointsDamaged:
        return False  # the worker that resumes the trial names the damaged checkpoints
    return newest is not None and newest.epoch >= epochs


def _curve(rows: Sequence[Row], spec: SweepSpec) -> tuple[SavedReport, ...]:
    return tuple(
        SavedReport(
            int(row.metrics[spec.budget.report_word]),
            row.step,
            row.metrics[spec.metrics[0]],
            tuple(row.metrics[metric] for metric in spec.reported[1:]),
        )
        for row in rows
        if row.metrics.keys() >= {spec.budget.report_word, *spec.reported}
    )
