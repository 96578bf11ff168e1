"""Reconciliation: from what ledger, store, tracking and lock say to what must be put right.

`reconcile` is a pure function, and the only place that decides it. `run`, `resume` and `extend`
apply all of its corrections before anything else happens; `sync` those that concern tracking
alone; `doctor` shows them. What must not live here: reading the facts (`facts`) and carrying out
the corrections (`corrections`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sweeps.ledger.reader import Ending, TrialRecord
from tracking.recorder import Status
from trainable.errors import NonFiniteMetric
from trainable.metrics_file import Row

STATUSES: Mapping[str, Status] = {
    "complete": "FINISHED",
    "pruned": "KILLED",
    "failed": "FAILED",
}
"""How a trial's end in the ledger is told to tracking."""


class SavedReport(NamedTuple):
    """The metric after an epoch, as the store's curve has it."""

    epoch: int
    step: int
    value: float
    others: tuple[float, ...] = ()
    """The sweep's other metrics."""


@dataclass(frozen=True)
class TrialState:
    """What is known of one trial."""

    record: TrialRecord
    """The ledger's."""
    curve: tuple[SavedReport, ...] = ()
    """The store's."""
    started: bool = False
    """A driver has written down with what it trains: the last thing before a worker is told."""
    trained: bool = False
    """The store has the last epoch, and a sound checkpoint of it."""
    stopped: bool = False
    """The scheduler stops it at its last report."""
    trained_past_report: bool = False
    """The store has steps after the last report: the verdict on it was to go on."""
    tracked_status: str | None = None
    """The status that tracking was told last; None: it was never told of the trial."""
    rows: tuple[Row, ...] = ()
    """The store's rows that tracking must have: those up to the last report, or to the end."""
    unlogged: bool = False
    """Tracking was never given some of them."""
    stale_writer: bool = False
    """A worker was killed before it closed the store's checkpoints."""


@dataclass(frozen=True)
class SweepState:
    """What is known of one sweep."""

    trials: Sequence[TrialState]
    metric: str = ""
    """What a trial's reports are values of."""
    parameters: frozenset[str] = frozenset()
    """What every trial has a value of."""
    strangers: Sequence[str] = field(default=())
    """Directories below `trials/` that belong to no trial of the ledger."""
    num_awaited: int = 0
    """How many trials the sweep shall have."""
    stop: str | None = None
    """Why the sweep is over although trials have no end; None while it is not."""
    live: bool = False
    """A driver holds the lock: what is unfinished is being worked on."""


@dataclass(frozen=True)
class MissingReport:
    """The ledger lacks a report that the store has."""

    number: int
    report: SavedReport

    def __str__(self) -> str:
        return f"trial {self.number}: the ledger lacks the report of epoch {self.report.epoch}"


@dataclass(frozen=True)
class MissingParams:
    """A trial that nobody began lacks parameters: the space was edited since, or an older release
    stored them one by one and died."""

    number: int

    def __str__(self) -> str:
        return f"trial {self.number}: its parameters are incomplete"


@dataclass(frozen=True)
class UncountedAttempt:
    """A driver began a trial, and died before it had counted the attempt."""

    number: int

    def __str__(self) -> str:
        return f"trial {self.number}: the ledger has not counted the attempt that began it"


@dataclass(frozen=True)
class MissingRun:
    """Tracking was never told of a trial that was begun, or has ended."""

    number: int
    at_ms: int | None = None
    """When it began, in milliseconds since the Unix epoch; None: nobody knows."""

    def __str__(self) -> str:
        return f"trial {self.number}: tracking has no run of it"


@dataclass(frozen=True)
class MissingMetrics:
    """Tracking lacks rows that the store has."""

    number: int
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return f"trial {self.number}: tracking lacks part of its curve"


@dataclass(frozen=True)
class UnrecordedEnd:
    """A trial came to its end and nobody wrote it down."""

    number: int
    ending: Ending
    reason: str | None = None

    def __str__(self) -> str:
        return f"trial {self.number}: it ended ({self.ending}), which the ledger does not know"


@dataclass(frozen=True)
class StaleWriter:
    """A trial has ended, and what its worker was writing with is still there."""

    number: int

    def __str__(self) -> str:
        return f"trial {self.number}: its worker was killed and left its checkpoints open"


@dataclass(frozen=True)
class StaleRunStatus:
    """Tracking does not know the end that the ledger has."""

    number: int
    status: Status
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return f"trial {self.number}: tracking does not know that its run is {self.status}"


@dataclass(frozen=True)
class OrphanedRun:
    """Tracking takes a trial for running on which nobody works."""

    number: int
    at_ms: int | None = None
    """When somebody last did, as above."""

    def __str__(self) -> str:
        return f"trial {self.number}: its run looks live, and nobody works on it"


@dataclass(frozen=True)
class UnknownDirectory:
    """A directory that belongs to no trial; it is named and left alone."""

    directory: str
    in_the_way: bool
    """A trial that is still to come would take it for its own."""

    def __str__(self) -> str:
        return f"trials/{self.directory} belongs to no trial of the ledger"


@dataclass(frozen=True)
class MissingTrials:
    """The ledger lost trials; nothing can be put right."""

    missing: tuple[int, ...]

    def __str__(self) -> str:
        return f"the ledger has no trial {', '.join(map(str, self.missing))}, but later ones"


Correction = (
    MissingReport
    | MissingParams
    | UncountedAttempt
    | MissingRun
    | MissingMetrics
    | UnrecordedEnd
    | StaleWriter
    | StaleRunStatus
    | OrphanedRun
    | UnknownDirectory
    | MissingTrials
)


def reconcile(facts: SweepState) -> list[Correction]:
    """Return what must be put right, in the order in which it must be done.

    The ledger knows which trials exist and how they ended; the store knows what they trained; so
    the ledger is completed from the store, and tracking from both. Nothing is ever taken back.
    """
    numbers = [trial.record.number for trial in facts.trials]
    if missing := tuple(n for n in range(max(numbers, default=-1)) if n not in set(numbers)):
        return [MissingTrials(missing)]
    coming = {f"{number:04d}" for number in range(len(numbers), facts.num_awaited)}
    found: list[Correction] = [UnknownDirectory(name, name in coming) for name in facts.strangers]
    if not facts.live:
        for trial in facts.trials:
            found += _of_finished(trial) if trial.record.finished else _of_open(trial, facts)
    return found


def tracking_gaps(
    facts: SweepState,
) -> Iterator[MissingRun | MissingMetrics | StaleRunStatus | OrphanedRun]:
    """Yield what can be put right in tracking alone, by one who does not run the sweep.

    A trial whose end the ledger does not know is interrupted until a resume finds its end.
    """
    for trial in facts.trials:
        for wrong in _of_finished(trial) if trial.record.finished else _of_open(trial, facts):
            if isinstance(wrong, MissingRun | MissingMetrics | StaleRunStatus | OrphanedRun):
                yield wrong
            elif isinstance(wrong, UnrecordedEnd) and trial.tracked_status in (None, "RUNNING"):
                yield OrphanedRun(wrong.number, _last_ms(trial))


def end_of_training(reports: Mapping[int, float], metric: str) -> tuple[Ending, str | None]:
    """Return how a trial ends that was trained to its last epoch, and why.

    One that never had a finite value failed: it may have been let go on to later epochs, and the
    budget was shortened since.

    Args:
        reports: The metric after each epoch.
        metric: Its name.
    """
    if any(map(math.isfinite, reports.values())):
        return "complete", None
    last = max(reports)
    failure = NonFiniteMetric(metric, last, reports[last])
    return "failed", f"{failure.kind}: {failure}"


def unreported(trial: TrialState) -> Iterator[MissingReport | MissingMetrics]:
    """Yield what a trial's worker had stored and could not tell any more when it died."""
    number, known = trial.record.number, trial.record.reports
    yield from (
        MissingReport(number, report) for report in trial.curve if report.epoch not in known
    )
    if trial.unlogged:
        yield MissingMetrics(number, trial.rows)


def _of_open(trial: TrialState, facts: SweepState) -> Iterator[Correction]:
    number, is_untold = trial.record.number, trial.tracked_status is None
    if trial.record.attempts == 0:
        if trial.started:  # with the parameters that it has, whatever the space is now
            yield UncountedAttempt(number)
        elif not trial.record.params.keys() >= facts.parameters:
            yield MissingParams(number)
    ending, reason = _ending(trial, facts)
    if is_untold and (trial.unlogged or ending):
        yield MissingRun(number, _first_ms(trial))
    yield from unreported(trial)
    if ending:
        if trial.stale_writer:
            yield StaleWriter(number)
        yield UnrecordedEnd(number, ending, reason)
    elif trial.tracked_status == "RUNNING" or (is_untold and trial.unlogged):
        yield OrphanedRun(number, _last_ms(trial))


def _ending(trial: TrialState, facts: SweepState) -> tuple[Ending | None, str | None]:
    if trial.trained:
        reports = {report.epoch: report.value for report in trial.curve}
        return end_of_training(reports | trial.record.reports, facts.metric)
    if trial.stopped and not trial.trained_past_report:
        return "pruned", None
    return ("pruned", facts.stop) if facts.stop else (None, None)


def _of_finished(trial: TrialState) -> Iterator[Correction]:
    if trial.stale_writer:  # one that is not finished is closed by whoever goes on with it
        yield StaleWriter(trial.record.number)
    status = STATUSES[trial.record.state]
    if trial.tracked_status is None:
        yield MissingRun(trial.record.number, _first_ms(trial))
    if trial.tracked_status != status:
        yield StaleRunStatus(trial.record.number, status, trial.rows)


def _first_ms(trial: TrialState) -> int | None:
    return trial.rows[0].timestamp_ms if trial.rows else trial.record.ended_ms


def _last_ms(trial: TrialState) -> int | None:
    return trial.rows[-1].timestamp_ms if trial.rows else None
