"""Find what a tracking store lacks of a sweep: runs, statuses, parameters, tags, points, files.

A store that was restored from an older copy, emptied or edited by hand raises no error. One
trial's curve at a time is in memory, and nothing is changed. What must not live here: reading a
store (`tracking.tracker`), and sending what it lacks (`run.sync`).
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sweeps.artifacts.trial_figures import figure_files
from sweeps.engine.process_cleanup import untagged_env
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.reconcile.collect_state import trial_state
from sweeps.reconcile.repairs import told_start
from sweeps.recording.descriptions import DESCRIPTION, describe_sweep
from sweeps.recording.tags import (
    STOPPED_BY_INTERRUPT,
    attempt_tags,
    best_tags,
    curve_tags,
    end_tags,
    front_tags,
    health_tags,
    run_status,
    status_tags,
)
from sweeps.search.pbt_exploit import without_unbegun
from sweeps.spec.revisions import read_revisions
from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import flatten
from sweeps.stores import find_tracker
from sweeps.view.outcome import find_failure
from sweeps.view.sweep_view import SweepView
from tracking.limits import clean_key
from tracking.metric_points import HighWaterMarks, MetricRow
from tracking.outbox import SWEEP
from tracking.outbox_status import DeliveryStatus, read_outbox
from tracking.recorder import Status, clean_tags, stored_status
from tracking.tracker import (
    Curve,
    RunData,
    StoredRun,
    StoreReader,
    StoreUnreadable,
    Tracker,
    choose_runs,
)
from tracking.unsent_rows import thin_rows
from trainable.store.metrics_file import read_rows
from trainable.store.notes import tested_rows

_BATCH_SIZE = 50
"""Trials per query to a store."""
_SEVERAL = {"run in the trash": "runs in the trash", "status": "statuses"}
"""Words whose plural is not made by an s."""


@dataclass(frozen=True)
class MissingData:
    """What a store lacks of one run."""

    trial: int | None
    """The trial's number; None: the sweep's own run."""
    is_gone: bool = False
    """The store has no such run."""
    is_new: bool = False
    """No store has received it yet: it is not lost."""
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
        numbers = [
            (
                *(one.is_gone, one.is_deleted, one.has_wrong_status),
                *(one.num_params, one.num_tags, one.num_points, len(one.files)),
            )
            for one in found
        ]
        return cls(*map(sum, zip(*numbers, strict=True)))

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
        words = (
            *("run", "run in the trash", "status"),
            *("parameter", "tag", "metric value", "artifact"),
        )
        return ", ".join(
            f"{count} {word if count == 1 else _SEVERAL.get(word, f'{word}s')}"
            for word, count in zip(words, vars(self).values(), strict=True)
            if count
        )


@dataclass(frozen=True)
class _ExpectedRun:
    """What a store should hold of one run, besides its points."""

    params: Mapping[str, object]
    tags: Mapping[str, str]
    files: Mapping[str, frozenset[str]]
    """Names of artifacts, by folder."""


def is_concluded(ledger: LedgerReader) -> bool:
    """Return whether a driver has published the best of all trials."""
    return 0 < ledger.num_published == len(ledger.trials)


class StoreComparison:
    """Finds what a tracking store lacks of a sweep.

    Runs that were not delivered before this is made, to any store, are new.
    """

    def __init__(self, paths: SweepPaths, spec: SweepSpec, tracker: Tracker) -> None:
        self._paths, self._spec = paths, spec
        self._ledger = LedgerReader(paths.ledger)
        self.sweep_id = self._ledger.sweep_id
        self.records = self._ledger.records()
        self._concluded = is_concluded(self._ledger)
        self._best = self._ledger.best() if len(spec.metrics) == 1 else None
        delivered = read_outbox(paths.outbox)
        self._delivered = _known_runs(delivered).keys()
        tracked_sweep_status = delivered.tracked_sweep_status
        if tracked_sweep_status is None and self._concluded:
            tracked_sweep_status = "FINISHED" if self._ledger.front() else "FAILED"
        endings: tuple[Status, ...] = ("FINISHED", "FAILED")
        self._ending: Status = next(
            (one for one in endings if one == tracked_sweep_status), "INTERRUPTED"
        )
        self.densities = [one.tracking.every for one in read_revisions(paths.spec)]
        self._tracker = tracker

    @functools.cached_property
    def store(self) -> StoreReader:
        """A reader of the tracking store, opened when it is first asked."""
        known = read_outbox(self._paths.outbox).experiment_id
        return self._tracker.reader(self._spec.name, known)

    def missing_runs(self) -> list[MissingData]:
        """Return the runs that the store lacks or has with another status, if it is readable."""
        if not self._tracker.reads_back:
            return []
        return self._check_runs(read_outbox(self._paths.outbox), self.store.runs(self.sweep_id))

    def all_missing(self) -> list[MissingData]:
        """Return everything that the store lacks of what was sent; the outbox must be empty."""
        delivered, front = read_outbox(self._paths.outbox), self._front_tags()
        runs = self.store.runs(self.sweep_id)
        found = {one.trial: one for one in self._check_runs(delivered, runs)}
        chosen = choose_runs(runs, _known_runs(delivered))
        every_run: list[TrialRecord | None] = [None, *self.records]
        for first in range(0, len(every_run), _BATCH_SIZE):
            part = every_run[first : first + _BATCH_SIZE]
            there = [
                (record, chosen[number])
                for record in part
                if (number := SWEEP if record is None else record.number) in chosen
            ]
            data = self.store.data([run.run_id for _, run in there])
            for record, run in there:
                name = _name(run.trial)
                expected = self._expected(record, front)
                held = data[run.run_id]
                one = _compare(found.get(name, MissingData(name)), expected, run, held, self.store)
                if record is not None:
                    rows = self._rows(record)
                    points = _missing_points(rows, run.run_id, held.curves, self.store)
                    one = replace(one, num_points=points)
                if one:
                    found[one.trial] = one
            for record in part:  # count the contents of missing runs
                gone = found.get(None if record is None else record.number)
                if gone is not None and gone.is_gone:
                    found[gone.trial] = self._whole(gone, record)
        return list(found.values())

    def _check_runs(
        self, delivered: DeliveryStatus, runs: Sequence[StoredRun]
    ) -> list[MissingData]:
        # a killed driver did not send the end of a sweep that still counts as running
        running = delivered.tracked_sweep_status == "RUNNING"
        status = None if running else stored_status(self._ending)
        found = _check_runs(self.records, delivered, runs, status)
        known = self._delivered | _known_runs(delivered).keys()
        return [
            replace(one, is_new=(SWEEP if one.trial is None else one.trial) not in known)
            for one in found
        ]

    def _expected(
        self, record: TrialRecord | None, front: Mapping[int | None, Mapping[str, str]]
    ) -> _ExpectedRun:
        """Return what the store should hold of a trial's run; None: of the sweep's own run."""
        paths, spec = self._paths, self._spec
        if record is None:
            params = dict(flatten(spec.model_dump(mode="json")))
            return _ExpectedRun(params, self._sweep_tags(), self._sweep_files())
        start = told_start(paths, spec, record)
        if record.finished:
            tags = end_tags(record, spec, paths)
        else:
            tags = status_tags(without_unbegun(record, paths), spec)
        tags = {**tags, **start.tags, **front.get(record.number, {})}
        return _ExpectedRun(start.params, tags, {"figures": self._figures(record.number)})

    def _rows(self, record: TrialRecord) -> Iterable[MetricRow]:
        # A row of a curve that is at no multiple of all densities may be missing.
        return stored_rows(self._paths, self._spec, record, math.lcm(*self.densities))

    def _figures(self, number: int) -> frozenset[str]:
        return frozenset(file.name for file in figure_files(self._paths, number))

    def _whole(self, gone: MissingData, record: TrialRecord | None) -> MissingData:
        """Count the points and the files of a missing run."""
        if record is None:
            files = [name for names in self._sweep_files().values() for name in names]
            return replace(gone, files=tuple(files))
        points = sum(map(len, _steps(self._rows(record)).values()))
        return replace(gone, num_points=points, files=tuple(self._figures(record.number)))

    def _sweep_tags(self) -> dict[str, str]:
        best = [one for one in self.records if self._best and one.number == self._best.number]
        return {
            **attempt_tags(self._ledger.attempts),
            **curve_tags(self.densities),
            **health_tags(self.records),
            **(best_tags(best[0]) if best and self._concluded else {}),
            **self._front_tags().get(None, {}),
            **(STOPPED_BY_INTERRUPT if self._ending == "INTERRUPTED" else self._description()),
        }

    def _description(self) -> dict[str, str]:
        front = self._ledger.front()
        why = None if front else find_failure(self.records).cause
        return {DESCRIPTION: describe_sweep(self.records, front, self._spec, why)}

    def _front_tags(self) -> Mapping[int | None, Mapping[str, str]]:
        if len(self._spec.metrics) == 1 or not self._concluded:
            return {}
        numbers = {one.number for one in self._ledger.front()}
        front = [one for one in self.records if one.number in numbers]
        return front_tags(front, self.records)

    def _sweep_files(self) -> dict[str, frozenset[str]]:
        files = {"": frozenset({"sweep.yaml"})}
        if self._concluded and self._best is not None:
            files["best"] = frozenset({"config.yaml"})
            files["figures"] = self._figures(self._best.number)
        return files


def _check_runs(
    records: Sequence[TrialRecord],
    delivered: DeliveryStatus,
    runs: Sequence[StoredRun],
    sweep_status: str | None,
) -> list[MissingData]:
    """Compare which runs exist, and the statuses of ended trials without entries in the outbox."""
    known = _known_runs(delivered)
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
    """Return lost runs and wrong statuses, in a process that must not import MLflow."""
    delivered = read_outbox(paths.outbox)
    if delivered.sweep_run_id is None and not delivered.run_ids:
        # the store never received anything
        return []
    tracker = find_tracker(paths, spec)
    runs = tracker.read_runs(spec.name, delivered.experiment_id, sweep_id, environment)
    statuses = {"INTERRUPTED": "KILLED", "FINISHED": "FINISHED", "FAILED": "FAILED"}
    status = statuses.get(delivered.tracked_sweep_status or "")
    return _check_runs(records, delivered, runs, status)


def has_lost_runs(view: SweepView, warn: Callable[[str], None]) -> bool:
    """Whether the store has lost runs of a finished sweep, which a resume then sends again."""
    find_tracker(view.paths, view.spec).probe(known=True)
    try:
        found = lost_runs(
            view.paths,
            view.spec,
            view.ledger.records(),
            view.ledger.sweep_id,
            untagged_env(),
        )
    except StoreUnreadable as error:
        warn(str(error))
        return False
    return bool(found)


def _compare(
    before: MissingData, expected: _ExpectedRun, run: StoredRun, held: RunData, store: StoreReader
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


def _known_runs(delivered: DeliveryStatus) -> dict[int, str]:
    """Return the ids of the runs that were created, those of trials and the sweep's own."""
    own = delivered.sweep_run_id
    return dict(delivered.run_ids) if own is None else {**delivered.run_ids, SWEEP: own}


def _name(trial: int) -> int | None:
    return None if trial == SWEEP else trial
