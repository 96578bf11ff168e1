"""The facts of a sweep, read from their owners: ledger, store, tracking, lock.

Reads only, imports neither torch nor Ray, and works from any process. What must not live here:
what follows from the facts (`reconcile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sweeps.checkpoint_locations import trial_files, trial_store
from sweeps.config.spec import SweepSpec
from sweeps.early_stopping.pausing_rules import StopDecider
from sweeps.ledger.reader import TrialRecord
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.reconciliation.reconcile import STATUSES, SavedReport, SweepState, TrialState
from sweeps.recording.downsampling import thin_rows
from tracking.outbox_status import DeliveryStatus, read_outbox
from trainable.checkpoint import CheckpointStore
from trainable.errors import AllCheckpointsDamaged
from trainable.metrics_file import Row, read_logged, read_rows


def read_sweep_state(
    paths: SweepPaths,
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    *,
    live: bool,
    judge: StopDecider | None = None,
    stop: str | None = None,
) -> SweepState:
    """Read the facts of a sweep.

    Args:
        paths: Where it lives.
        spec: What it is.
        records: The ledger's trials.
        live: Whether a driver is at work; None of ours counts.
        judge: The scheduler's verdict; without one no trial counts as stopped.
        stop: Why the whole sweep is over before all of its trials are; None: it is not.

    Raises:
        CurveDamaged: A curve cannot be read.
        OutboxError: The outbox cannot be read.
        StorageError: The object store that has its checkpoints cannot be reached.
    """
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
        parameters=frozenset(spec.search_space().unconditional()),
        strangers=sorted(entry.name for entry in found if entry.name not in known),
        num_awaited=spec.trials,
        stop=stop,
        live=live,
    )


def trial_state(
    paths: SweepPaths, spec: SweepSpec, record: TrialRecord, delivered: DeliveryStatus
) -> TrialState:
    """Read the facts of one trial.

    Raises:
        CurveDamaged: Its curve cannot be read.
        StorageError: The object store that has its checkpoints cannot be reached.
    """
    number, told = record.number, delivered.told.get(record.number)
    directory = paths.trial(number)
    stale_writer = trial_files(paths, spec, number).has_writer()
    if record.finished and told == STATUSES[record.state]:
        # Both know its end, and rows are queued before it.
        return TrialState(record, tracked_status=told, stale_writer=stale_writer)
    rows = read_rows(directory)
    curve = _curve(rows, spec)
    if not record.finished:
        # A worker stores a row before the checkpoint that has it; if it was killed between, the
        # row is trained and reported again.
        saved = trial_store(paths, spec, number).saved_epoch()
        curve = tuple(r for r in curve if r.epoch <= saved or r.epoch in record.reports)
    # A trial that goes on reports the rows after its last report itself, or trains them again.
    last = curve[-1].step if curve else 0
    kept = rows if record.finished else [row for row in rows if row.step <= last]
    logged = (
        *(row for at, row in read_logged(directory) if record.finished or at <= last),
        *thin_rows(kept, spec.tracking.every, ended=record.finished),
    )
    return TrialState(
        record,
        curve,
        started=(directory / TRIAL_CONFIG).exists() or bool(rows),
        trained=bool(curve)
        and not record.finished
        and curve[-1].epoch >= spec.budget.epochs
        and _is_sound(trial_store(paths, spec, number), spec.budget.epochs),
        trained_past_report=len(kept) < len(rows),
        tracked_status=told,
        rows=logged,
        unlogged=delivered.lacks(number, logged),
        stale_writer=stale_writer,
    )


def _judged(
    trials: Sequence[TrialState], judge: StopDecider, paths: SweepPaths, spec: SweepSpec
) -> list[TrialState]:
    reports = {
        trial.record.number: {
            **{report.epoch: report.value for report in trial.curve},
            **trial.record.reports,
        }
        for trial in trials
    }
    stopped = judge(reports, {t.record.number for t in trials if not t.record.finished})

    def ends(number: int) -> bool:
        last = max(reports[number], default=0)
        # The last epoch ends a trial by itself; one that was not saved there is trained again.
        return (
            number in stopped
            and last < spec.budget.epochs
            and last <= trial_store(paths, spec, number).saved_epoch()
        )

    return [replace(t, stopped=ends(number)) for number, t in zip(reports, trials, strict=True)]


def _is_sound(store: CheckpointStore, epochs: int) -> bool:
    try:
        newest = store.newest()
    except AllCheckpointsDamaged:
        return False  # who trains it on is told what is damaged
    return newest is not None and newest.epoch >= epochs


def _curve(rows: Sequence[Row], spec: SweepSpec) -> tuple[SavedReport, ...]:
    return tuple(
        SavedReport(
            int(row.metrics["epoch"]),
            row.step,
            row.metrics[spec.metrics[0]],
            tuple(row.metrics[metric] for metric in spec.metrics[1:]),
        )
        for row in rows
        if row.metrics.keys() >= {"epoch", *spec.metrics}
    )
