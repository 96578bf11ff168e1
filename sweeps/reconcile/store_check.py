"""Find what a tracking store lacks of a sweep: runs, statuses, parameters, tags, points, files.

A store that was restored from an older copy, emptied or edited by hand raises no error. One
trial's curve at a time is in memory. What must not live here: reading a store
(`tracking.tracker`), and sending what it lacks (`run.sync`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sweeps.ledger.trials import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.reconcile.collect_state import trial_state
from sweeps.reconcile.repairs import told_start
from sweeps.recording.descriptions import DESCRIPTION
from sweeps.recording.tags import end_tags, run_status, status_tags
from sweeps.search.pbt_exploit import without_unbegun
from sweeps.spec.spec import SweepSpec
from sweeps.stores import find_tracker
from tracking.limits import clean_key
from tracking.metric_points import HighWaterMarks, MetricRow
from tracking.outbox import SWEEP
from tracking.outbox_status import DeliveryStatus, read_outbox
from tracking.recorder import clean_tags
from tracking.tracker import Curve, RunData, StoredRun, StoreReader, choose_runs
from tracking.trial_log import thin_rows
from trainable.store.metrics_file import read_rows
from trainable.store.notes import tested_rows

_BATCH_SIZE = 50
"""Trials per query to a store."""


@dataclass(frozen=True)
class MissingData:
    """What a store lacks of one run."""

    trial: int | None
    """The trial's number; None: the sweep's own run."""
    is_gone: bool = False
    """The store has no such run."""
    is_deleted: bool = False
    """The run is in the store's trash."""
    has_wrong_status: bool = False
    num_params: int = 0
    num_tags: int = 0
    num_points: int = 0
    files: tuple[str, ...] = ()
    """Names of artifacts."""

    @property
    def is_of_the_run(self) -> bool:
        """Whether anything but files is missing."""
        numbers = self.num_params, self.num_tags, self.num_points
        return self.is_gone or self.is_deleted or self.has_wrong_status or any(numbers)

    def __bool__(self) -> bool:
        return self.is_of_the_run or bool(self.files)


@dataclass(frozen=True)
class Missing:
    """Counts of what a store lacks of a sweep."""

    runs: int = 0
    deleted_runs: int = 0
    statuses: int = 0
    params: int = 0
    tags: int = 0
    points: int = 0
    files: int = 0

    @classmethod
    def of(cls, found: Iterable[MissingData]) -> Missing:
        """Sum up what the runs lack."""
        found = list(found)
        return cls(
            sum(one.is_gone for one in found),
            sum(one.is_deleted for one in found),
            sum(one.has_wrong_status for one in found),
            sum(one.num_params for one in found),
            sum(one.num_tags for one in found),
            sum(one.num_points for one in found),
            sum(len(one.files) for one in found),
        )

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def sentences(self, num_runs: int, command: str) -> Iterator[str]:
        """Yield what was done about lost runs, and the command that compares the rest."""
        if self.runs:
            yield f"{self.runs} of {num_runs} runs were missing in the tracking store: sent again"
        if self.statuses:
            yield f"{self.statuses} of {num_runs} runs had another status: sent again"
        if self.deleted_runs:
            yield f"{self.deleted_runs} of {num_runs} runs are deleted in the tracking store"
        yield f"compare the rest with: {command}"

    def __str__(self) -> str:
        names = {
            "runs": "run",
            "deleted_runs": "run in the trash",
            "statuses": "status",
            "params": "parameter",
            "tags": "tag",
            "points": "metric value",
            "files": "artifact",
        }
        several = {"deleted_runs": "runs in the trash", "statuses": "statuses"}
        return ", ".join(
            f"{count} {what if count == 1 else several.get(key, what + 's')}"
            for key, what in names.items()
            if (count := vars(self)[key])
        )


@dataclass(frozen=True)
class ExpectedRun:
    """What a store should hold of one run, besides its points."""

    params: Mapping[str, object]
    tags: Mapping[str, str]
    files: Mapping[str, frozenset[str]]
    """Names of artifacts, by folder."""


@dataclass(frozen=True, kw_only=True)
class ExpectedSweep:
    """What a store should hold of a sweep."""

    paths: SweepPaths
    spec: SweepSpec
    records: Sequence[TrialRecord]
    own_run: ExpectedRun
    """The sweep's own run."""
    own_status: str | None
    """Its status; None: unknown."""
    every: int
    """A row of a curve that is at no multiple of this step may be missing."""
    more_tags: Mapping[int | None, Mapping[str, str]]
    """Tags of trials besides those of each trial's own state."""
    drawn: Callable[[int], Iterable[Path]]
    """Returns the files of a trial's recorded figures."""

    def of(self, record: TrialRecord) -> ExpectedRun:
        """Return what the store should hold of a trial's run."""
        start = told_start(self.paths, self.spec, record)
        tags = {**_tags(self.spec, self.paths, record), **start.tags}
        tags |= self.more_tags.get(record.number, {})
        return ExpectedRun(start.params, tags, {"figures": self.figures(record)})

    def figures(self, record: TrialRecord) -> frozenset[str]:
        """Return the names of a trial's figures."""
        return frozenset(file.name for file in self.drawn(record.number))

    def rows(self, record: TrialRecord) -> Iterable[MetricRow]:
        """Return the rows that the store should hold of a trial."""
        return stored_rows(self.paths, self.spec, record, self.every)


def check_runs(
    records: Sequence[TrialRecord],
    delivered: DeliveryStatus,
    runs: Sequence[StoredRun],
    sweep_status: str | None,
) -> list[MissingData]:
    """Compare which runs exist, and the statuses of ended trials without entries in the outbox."""
    known = dict(delivered.run_ids)
    if delivered.sweep_run_id is not None:
        known[SWEEP] = delivered.sweep_run_id
    chosen = choose_runs(runs, known)
    expected: dict[int, str | None] = {SWEEP: sweep_status}
    for record in records:
        if record.finished:
            expected[record.number] = run_status(record)
        elif (tracked_status := delivered.tracked_statuses.get(record.number)) is not None:
            expected[record.number] = "KILLED" if tracked_status == "INTERRUPTED" else None
    found = []
    for trial, status in expected.items():
        run = chosen.get(trial)
        is_waiting = trial in delivered.waiting
        if run is None:
            one = MissingData(_name(trial), is_gone=trial in known or not is_waiting)
        else:
            is_wrong = status not in (None, run.status) and not is_waiting
            one = MissingData(_name(trial), is_deleted=run.deleted, has_wrong_status=is_wrong)
        if one:
            found.append(one)
    return found


def lost_runs(
    paths: SweepPaths,
    spec: SweepSpec,
    records: Sequence[TrialRecord],
    sweep_id: str,
    environment: Mapping[str, str],
) -> list[MissingData]:
    """Compare as `check_runs` does, in a process that must not import a tracking client."""
    delivered = read_outbox(paths.outbox)
    if delivered.sweep_run_id is None and not delivered.run_ids:
        # the store never received anything
        return []
    tracker = find_tracker(paths, spec)
    runs = tracker.read_runs(spec.name, delivered.experiment_id, sweep_id, environment)
    statuses = {"INTERRUPTED": "KILLED", "FINISHED": "FINISHED", "FAILED": "FAILED"}
    return check_runs(records, delivered, runs, statuses.get(delivered.tracked_sweep_status or ""))


def check_all(expected: ExpectedSweep, store: StoreReader, sweep_id: str) -> list[MissingData]:
    """Compare everything that was sent to a store with its contents. The outbox must be empty."""
    delivered, records = read_outbox(expected.paths.outbox), expected.records
    runs = store.runs(sweep_id)
    found = {one.trial: one for one in check_runs(records, delivered, runs, expected.own_status)}
    known = {**delivered.run_ids, SWEEP: delivered.sweep_run_id or ""}
    chosen = choose_runs(runs, known)
    every_run = [None, *records]
    for first in range(0, len(every_run), _BATCH_SIZE):
        part = every_run[first : first + _BATCH_SIZE]
        there = [
            (record, chosen[number])
            for record in part
            if (number := SWEEP if record is None else record.number) in chosen
        ]
        data = store.data([run.run_id for _, run in there])
        for record, run in there:
            before, held = (
                found.get(_name(run.trial), MissingData(_name(run.trial))),
                data[run.run_id],
            )
            wanted = expected.own_run if record is None else expected.of(record)
            one = _compare(before, wanted, run, held, store)
            if record is not None:
                points = _missing_points(expected.rows(record), run.run_id, held.curves, store)
                one = replace(one, num_points=points)
            if one:
                found[one.trial] = one
        for record in part:  # count the contents of missing runs
            gone = found.get(None if record is None else record.number)
            if gone is not None and gone.is_gone:
                found[gone.trial] = _whole(gone, expected, record)
    return list(found.values())


def _compare(
    before: MissingData, expected: ExpectedRun, run: StoredRun, held: RunData, store: StoreReader
) -> MissingData:
    # An empty tag means the same as a missing one. A description may have been edited since.
    wrong = [
        key
        for key, value in clean_tags(expected.tags).items()
        if (found := held.tags.get(key, "")) != value and not (found and key == DESCRIPTION)
    ]
    lacking = [
        f"{folder}/{name}" if folder else name
        for folder, names in expected.files.items()
        if names
        for name in sorted(names - store.files(run, folder))
    ]
    return replace(
        before,
        num_params=sum(clean_key(key) not in held.params for key in expected.params),
        num_tags=len(wrong),
        files=tuple(lacking),
    )


def _whole(gone: MissingData, expected: ExpectedSweep, record: TrialRecord | None) -> MissingData:
    """Count the points and the files of a missing run."""
    if record is None:
        files = [name for names in expected.own_run.files.values() for name in names]
        return replace(gone, files=tuple(files))
    points = sum(map(len, _steps(expected.rows(record)).values()))
    return replace(gone, num_points=points, files=tuple(expected.figures(record)))


def _missing_points(
    rows: Iterable[MetricRow], run_id: str, held: Mapping[str, Curve], store: StoreReader
) -> int:
    """Count a curve's missing points; steps are read only for the keys that differ."""
    missing = 0
    for key, steps in _steps(rows).items():
        if held.get(key) != Curve(len(steps), sum(steps)):
            missing += len(set(steps) - (store.steps(run_id, key) if key in held else set()))
    return missing


def _steps(rows: Iterable[MetricRow]) -> Mapping[str, list[int]]:
    """Return the steps at which each metric is recorded."""
    steps: dict[str, list[int]] = defaultdict(list)
    for point in HighWaterMarks().filter_new(rows):
        steps[point.key].append(point.step)
    return steps


def stored_rows(
    paths: SweepPaths, spec: SweepSpec, record: TrialRecord, every: int
) -> Iterable[MetricRow]:
    """Return the rows of a trial that a store must have."""
    if record.finished:
        directory = paths.trial(record.number)
        return [*thin_rows(read_rows(directory), every, ended=True), *tested_rows(directory)]
    empty = DeliveryStatus(0, 0, None, None, {})
    return thin_rows(trial_state(paths, spec, record, empty).rows, every)


def _tags(spec: SweepSpec, paths: SweepPaths, record: TrialRecord) -> dict[str, str]:
    return (
        end_tags(record, spec, paths)
        if record.finished
        else status_tags(without_unbegun(record, paths), spec)
    )


def _name(trial: int) -> int | None:
    return None if trial == SWEEP else trial
