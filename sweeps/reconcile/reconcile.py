"""Compare the states of ledger, store, tracking and lock, and return the necessary corrections.

A trial's store is its metrics file and its checkpoints. `reconcile` is pure, and alone decides
what is wrong: a driver first applies all corrections, `sync` those to tracking, `doctor` shows
them. What must not live here: reading states (`collect_state`), applying corrections (`repairs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sweeps.ledger.reasons import is_by_request
from sweeps.ledger.trials import Ending, TrialRecord
from sweeps.recording.tags import run_status
from sweeps.spec.sections import Select
from sweeps.stopping.patience import Patience
from tracking.recorder import Status
from trainable.errors import NonFiniteMetric
from trainable.store.metrics_file import Row

_NOT_LIVE = {"RUNNING", "FAILED"}
"""Statuses that the run of an unfinished trial has no more once no worker trains it. It is FAILED
if the trial was reopened, and the driver died before it started."""


class SavedReport(NamedTuple):
    """The metrics after an epoch, as in the trial's metrics file."""

    epoch: int
    step: int
    value: float
    others: tuple[float, ...] = ()
    """The sweep's other metrics."""


@dataclass(frozen=True)
class TrialState:
    """The state of one trial in ledger, store and tracking."""

    record: TrialRecord
    """The ledger's record."""
    curve: tuple[SavedReport, ...] = ()
    """The store's reports."""
    started: bool = False
    """`config.yaml` exists or the trial has rows, so a driver dispatched the trial."""
    trained: bool = False
    """The store has the last epoch of the budget, and an undamaged checkpoint of it."""
    stop_reason: str | None = None
    """Why the scheduler stops the trial at its last report; None: it does not stop it."""
    would_stop_reason: str | None = None
    """Why it would stop an exempt trial at its last report, which the ledger lacks."""
    trained_past_report: bool = False
    """The store has steps after the last report, so the scheduler did not stop the trial there."""
    tracked_status: str | None = None
    """The last status sent to tracking; None: tracking has no run of the trial."""
    rows: tuple[Row, ...] = ()
    """The rows of its curve: up to the last report, or to the trial's end."""
    stale_writer: bool = False
    """A worker was killed before it closed the store's checkpoints."""
    untold_tests: tuple[Row, ...] = ()
    """The metrics on test data that were never sent to tracking."""


@dataclass(frozen=True)
class SweepState:
    """The state of one sweep in ledger, store, tracking and lock."""

    trials: Sequence[TrialState]
    metric: str = ""
    """The name of the (first) metric."""
    select: Select = "checkpoint"
    """What the values of the trials are."""
    patience: Patience | None = None
    """What may end a trial before its budget."""
    parameters: frozenset[str] = frozenset()
    """The parameters that every trial needs."""
    strangers: Sequence[str] = field(default=())
    """Directories below `trials/` that belong to no trial of the ledger."""
    num_awaited: int = 0
    """How many trials the spec requests."""
    stop: str | None = None
    """Why the sweep ends before all of its trials have run; None: it does not."""
    live: bool = False
    """A driver holds the lock and runs the unfinished trials."""


@dataclass(frozen=True)
class MissingReport:
    """The ledger lacks a report that the store has."""

    number: int
    report: SavedReport
    would_stop_reason: str | None = None
    """Why an exempt trial would have been stopped there; None: it would not."""

    def __str__(self) -> str:
        return f"trial {self.number}: the ledger lacks the report of epoch {self.report.epoch}"


@dataclass(frozen=True)
class MissingParams:
    """A trial that never started lacks parameters, as the user has changed the space since."""

    number: int

    def __str__(self) -> str:
        return f"trial {self.number}: its parameters are incomplete"


@dataclass(frozen=True)
class UncountedAttempt:
    """A driver started a trial, and died before it counted the attempt."""

    number: int

    def __str__(self) -> str:
        return f"trial {self.number}: the ledger has not counted the attempt that began it"


@dataclass(frozen=True)
class MissingRun:
    """Tracking has no run of a trial that has started or ended."""

    number: int
    at_ms: int | None = None
    """The trial's start in milliseconds since the Unix epoch; None: unknown."""

    def __str__(self) -> str:
        return f"trial {self.number}: tracking has no run of it"


@dataclass(frozen=True)
class MissingTests:
    """Tracking lacks metrics on test data."""

    number: int
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return f"trial {self.number}: tracking lacks its metrics on test data"


@dataclass(frozen=True)
class UnrecordedEnd:
    """A trial has ended, but the ledger has no record of its end."""

    number: int
    ending: Ending
    reason: str | None = None

    def __str__(self) -> str:
        return f"trial {self.number}: it ended ({self.ending}), which the ledger does not know"


@dataclass(frozen=True)
class StaleWriter:
    """A trial has ended, and its killed worker's writer directory still exists."""

    number: int

    def __str__(self) -> str:
        return f"trial {self.number}: its worker was killed and left its checkpoints open"


@dataclass(frozen=True)
class StaleRunStatus:
    """The status of a trial's run in tracking differs from the trial's end in the ledger."""

    number: int
    status: Status
    at_ms: int | None = None
    """The time of the trial's last row, in milliseconds since the Unix epoch; None: unknown."""

    def __str__(self) -> str:
        return f"trial {self.number}: tracking does not know that its run is {self.status}"


@dataclass(frozen=True)
class OrphanedRun:
    """Tracking shows a run as RUNNING or FAILED although its trial waits for a resume."""

    number: int
    at_ms: int | None = None
    """The time of the trial's last row, in milliseconds since the Unix epoch; None: unknown."""

    def __str__(self) -> str:
        return f"trial {self.number}: its run looks live or failed, and its trial waits"


OF_TRACKING = (MissingRun, MissingTests, StaleRunStatus, OrphanedRun)
"""The corrections of what tracking has."""


@dataclass(frozen=True)
class UnknownDirectory:
    """A directory belongs to no trial; the driver warns and leaves it unchanged."""

    directory: str
    in_the_way: bool
    """A later trial would use this directory as its own."""

    def __str__(self) -> str:
        return f"trials/{self.directory} belongs to no trial of the ledger"


@dataclass(frozen=True)
class MissingTrials:
    """The ledger lost trials; this cannot be corrected."""

    missing: tuple[int, ...]

    def __str__(self) -> str:
        return f"the ledger has no trial {', '.join(map(str, self.missing))}, but later ones"


Correction = (
    MissingReport
    | MissingParams
    | UncountedAttempt
    | MissingRun
    | MissingTests
    | UnrecordedEnd
    | StaleWriter
    | StaleRunStatus
    | OrphanedRun
    | UnknownDirectory
    | MissingTrials
)


def reconcile(state: SweepState) -> list[Correction]:
    """Return the corrections in the order in which they must be applied; none removes a record.

    The ledger is authoritative for which trials exist and how they ended, the store for what they
    trained: corrections complete the ledger from the store, and tracking from both.
    """
    numbers = [trial.record.number for trial in state.trials]
    if missing := tuple(n for n in range(max(numbers, default=-1)) if n not in set(numbers)):
        return [MissingTrials(missing)]
    coming = {f"{number:04d}" for number in range(len(numbers), state.num_awaited)}
    found: list[Correction] = [UnknownDirectory(name, name in coming) for name in state.strangers]
    if not state.live:
        for trial in state.trials:
            found += _of_finished(trial) if trial.record.finished else _of_open(trial, state)
    return found


def tracking_gaps(
    state: SweepState,
) -> Iterator[MissingRun | MissingTests | StaleRunStatus | OrphanedRun]:
    """Yield the corrections to tracking alone, for a process that does not run the sweep."""
    for trial in state.trials:
        for wrong in _of_finished(trial) if trial.record.finished else _of_open(trial, state):
            if isinstance(wrong, MissingRun | MissingTests | StaleRunStatus | OrphanedRun):
                yield wrong
            elif isinstance(wrong, UnrecordedEnd) and trial.tracked_status in (None, "RUNNING"):
                # INTERRUPTED until a resume records the end in the ledger
                yield OrphanedRun(wrong.number, _last_ms(trial))


def end_of_training(
    reports: Mapping[int, float], metric: str, select: Select, patience: Patience | None = None
) -> tuple[Ending, str | None]:
    """Return how a trial that made its last report ends, and why; without a value it fails.

    The scheduler may have let it continue, if the user then shortened the budget.
    """
    last = max(reports)
    if any(map(math.isfinite, [reports[last]] if select == "final" else reports.values())):
        return "complete", patience.reason(reports, metric) if patience else None
    failure = NonFiniteMetric(metric, last, reports[last])
    return "failed", f"{failure.kind}: {failure}"


def end_of_stopped(
    reports: Mapping[int, float], metric: str, select: Select, reason: str | None
) -> tuple[Ending, str | None]:
    """Return how a trial ends that is stopped, and why."""
    # A request decides nothing about values; a rule fails a trial without one.
    if reports and not is_by_request(reason):
        ending, failure = end_of_training(reports, metric, select)
        if ending == "failed":
            return ending, failure
    return "pruned", reason


def unreported(trial: TrialState) -> Iterator[MissingReport]:
    """Yield the reports that a worker stored but did not send before it died."""
    number, known = trial.record.number, trial.record.reports
    for report in trial.curve:
        if report.epoch not in known:
            is_last = report is trial.curve[-1]
            yield MissingReport(number, report, trial.would_stop_reason if is_last else None)


def _of_open(trial: TrialState, state: SweepState) -> Iterator[Correction]:
    number, is_untracked = trial.record.number, trial.tracked_status is None
    if trial.record.attempts == 0:
        if trial.started:  # it keeps its parameters, even if the space has changed
            yield UncountedAttempt(number)
        elif trial.record.role == "search" and not trial.record.params.keys() >= state.parameters:
            yield MissingParams(number)
    ending, reason = _ending(trial, state)
    if is_untracked and (trial.rows or ending):
        yield MissingRun(number, _first_ms(trial))
    yield from unreported(trial)
    if ending:
        if trial.stale_writer:
            yield StaleWriter(number)
        yield UnrecordedEnd(number, ending, reason)
    elif trial.tracked_status in _NOT_LIVE or (is_untracked and trial.rows):
        yield OrphanedRun(number, _last_ms(trial))


def _ending(trial: TrialState, state: SweepState) -> tuple[Ending | None, str | None]:
    reports = {report.epoch: report.value for report in trial.curve} | trial.record.reports
    if trial.trained:
        return end_of_training(reports, state.metric, state.select, state.patience)
    if trial.stop_reason is not None and not trial.trained_past_report:
        return end_of_stopped(reports, state.metric, state.select, trial.stop_reason)
    stops = state.stop is not None and trial.record.role in ("search", "repeat")
    return ("pruned", state.stop) if stops else (None, None)


def _of_finished(trial: TrialState) -> Iterator[Correction]:
    if trial.stale_writer:  # only here: the next worker of an unfinished trial removes it
        yield StaleWriter(trial.record.number)
    status = run_status(trial.record)
    if trial.tracked_status is None:
        yield MissingRun(trial.record.number, _first_ms(trial))
    if trial.tracked_status != status:
        yield StaleRunStatus(trial.record.number, status, _last_ms(trial))
    if trial.untold_tests:
        yield MissingTests(trial.record.number, trial.untold_tests)


def _first_ms(trial: TrialState) -> int | None:
    return trial.rows[0].timestamp_ms if trial.rows else trial.record.ended_ms


def _last_ms(trial: TrialState) -> int | None:
    return trial.rows[-1].timestamp_ms if trial.rows else None
