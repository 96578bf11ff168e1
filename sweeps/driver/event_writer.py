"""Writing down what happened to trials: to the recorder, the ledger and the view.

The ledger comes first, because it decides: what it has and the recorder was not told, because
the driver died between the two, a resume tells; nothing that was told has to be taken back.
Before anything is written the lock is looked at, by the recorder itself before each record: a
driver that stood still may have been replaced meanwhile. What must not live here: what it means
that something happened (`callbacks`), and in which thread it is written (`writing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from sweeps.config.logged_params import searched
from sweeps.config.spec import SpecError, SweepSpec
from sweeps.ledger.ledger import Ending, Ledger, LedgerReport, TrialRecord
from sweeps.ledger.reader import PbtPerturbation
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.policies.failure_policy import Failure
from sweeps.population.pbt_exploit import without_unbegun
from sweeps.reconciliation.collect_state import trial_state
from sweeps.reconciliation.reconcile import STATUSES, end_of_training, unreported
from sweeps.reconciliation.repairs import backfill
from sweeps.recording.downsampling import thin_rows
from sweeps.recording.tags import NOT_STOPPED, end_tags, lineage_tags, status_tags
from sweeps.results.observer import ProgressObserver, TrialProgress
from tracking.outbox_status import read_outbox
from tracking.recorder import Recorder
from trainable.files import sync_file
from trainable.metrics_file import Row, logged_files, read_logged, read_rows
from trainable.ray_adapter import OBJECTIVE


@dataclass(frozen=True)
class WorkerReport:
    """What a worker told of a trial."""

    number: int
    params: Mapping[str, Any]
    result: Mapping[str, Any]
    """See `TuneTrial.step`."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What the ledger is to note of it: news alone."""

    @property
    def reports(self) -> list[Mapping[str, Any]]:
        """The reports that came together, in order."""
        last = [self.result] if OBJECTIVE in self.result else []
        return [*self.result.get("earlier", ()), *last]

    @property
    def rows(self) -> list[Row]:
        """What was trained up to the last of them."""
        return [Row(*row) for report in self.reports for row in report["rows"]]

    @property
    def signals(self) -> list[str] | None:
        """What deserves a look after the last of them; None where all of them were told before."""
        looked = [one.get("signals", []) for one in self.reports if one["rows"]]
        return looked[-1] if looked else None


Entry = WorkerReport | Callable[[], None]
"""What waits to be written."""


class EventWriter:
    """Writes down what happened to trials.

    Args:
        spec: The sweep.
        paths: Where each trial's directory is.
        fence: Called right before the ledger is written; raises when another driver may run the
            sweep by now.
        on_end: Called with the record of each trial that has its end.
    """

    def __init__(
        self,
        spec: SweepSpec,
        paths: SweepPaths,
        ledger: Ledger,
        recorder: Recorder,
        view: ProgressObserver,
        *,
        fence: Callable[[], None],
        on_end: Callable[[TrialRecord], None],
    ) -> None:
        self._spec = spec
        self._paths = paths
        self._ledger = ledger
        self._recorder = recorder
        self._view = view
        self._fence = fence
        self._on_end = on_end

    def write(self, entries: Sequence[Entry]) -> None:
        """Write what waits, in order; reports that follow each other wait for the disk once."""
        for reports, some in groupby(entries, key=lambda entry: isinstance(entry, WorkerReport)):
            if reports:
                self._record_reports([entry for entry in some if isinstance(entry, WorkerReport)])
                continue
            for entry in some:
                assert not isinstance(entry, WorkerReport)
                entry()

    def open_run(self, number: int, parameters: Mapping[str, object]) -> None:
        """Open the run of a trial that was never begun.

        Args:
            parameters: What of its configuration is recorded.
        """
        self._recorder.start(number, parameters, {"gradsweep.attempts": "1"})

    def record_first_start(self, number: int, params: Mapping[str, Any]) -> None:
        """Count the first attempt at a trial whose run is open; what it began with is there for
        as long as that is.
        """
        self._fence()
        sync_file(self._paths.trial(number) / TRIAL_CONFIG)
        self._view.started(number, params, self._ledger.start(number))

    def record_restart(
        self, number: int, params: Mapping[str, Any], parameters: Mapping[str, object]
    ) -> None:
        """Count an attempt, open the trial's run, and catch up on what a worker stored and could
        not tell before it was lost.

        Args:
            params: The trial's.
            parameters: What of its configuration is recorded.
        """
        self._fence()
        attempt = self._ledger.start(number)
        record = self._ledger.trial(number)
        tags = status_tags(record)
        self._recorder.start(number, parameters, tags if attempt == 1 else tags | NOT_STOPPED)
        if attempt > 1:
            queued = read_outbox(self._paths.outbox, number)
            known = trial_state(self._paths, self._spec, record, queued)
            backfill(unreported(known), self._ledger, self._recorder)
        self._view.started(number, params, attempt)

    def record_worker_info(self, told: WorkerReport) -> None:
        """Record what a run says of itself, which nobody else could tell again."""
        noted = told.result.get("noted") or {}
        if params := noted.get("params"):
            self._recorder.start(told.number, params, {})
        resolved = told.result.get("resolved") or {}
        tags = {f"gradsweep.{key}": value for key, value in resolved.items()}
        tags |= noted.get("tags", {})
        damaged = told.result.get("set_aside") or []
        if damaged:
            tags["checkpoint.set_aside"] = "; ".join(damaged)
        if tags:
            self._recorder.tag(told.number, tags)
        for sentence in damaged:
            self._view.warned(told.number, sentence)

    def signals(self, number: int) -> list[str]:
        """What deserved a look when a trial was written down last."""
        return list(self._ledger.trial(number).signals or ())

    def promoted(self, number: int, parameters: Mapping[str, object]) -> None:
        """A paused trial goes on, perhaps with other parameters."""
        if told := lineage_tags(self._ledger.trial(number)):
            self._recorder.start(number, parameters, told)
        self._view.promoted(number)

    def paused(self, number: int) -> None:
        """A trial waits at a rung."""
        self._view.paused(number, self._ledger.trial(number).value)

    def record_interruption(self, number: int, tags: Mapping[str, str]) -> None:
        """A trial goes on when the sweep does."""
        self._recorder.finish(number, "INTERRUPTED", tags)
        self._view.ended(number, "interrupted", None, None)

    def finished(self, number: int, last: WorkerReport | None) -> None:
        """A trial was trained to its last epoch.

        Args:
            last: What it told with that, where it is not written yet.
        """

        def end(record: TrialRecord) -> tuple[Ending, str | None]:
            return end_of_training(record.reports, self._spec.metrics[0])

        if last is not None:
            self._log(number, last.rows)
        self._end(number, end, last=last)

    def pruned(self, number: int) -> None:
        """The scheduler let a trial go no further."""
        self._end(number, lambda _: ("pruned", None))

    def stopped(self, number: int, reason: str | None) -> None:
        """A trial was stopped while it was worked on."""
        # It may have been stopped between two reports; no later start would deliver the rest.
        self._log_the_rest(number)
        self._end(number, lambda _: ("pruned", reason))

    def stopped_waiting(self, number: int, reason: str | None) -> None:
        """A trial was stopped on which nobody works; one that has its end keeps that."""
        record = self._ledger.trial(number)
        if record.finished:
            return
        record = without_unbegun(record, self._paths)
        self._recorder.start(number, searched(record.params), {})
        self._log_the_rest(number)  # as above
        self._end(number, lambda _: ("pruned", reason), lineage=record.lineage)

    def failed(self, number: int, failure: Failure) -> None:
        """A trial failed."""
        self._log_the_rest(number)  # as above
        self._end(number, lambda _: ("failed", failure.reason), traceback=failure.traceback)

    def refused(self, number: int, error: SpecError) -> None:
        """A trial's values are no configuration."""
        self._recorder.start(number, searched(self._ledger.trial(number).params), {})
        self._log_the_rest(number)  # of what it was before the spec changed
        self._end(number, lambda _: ("failed", f"config: {error}"))

    def _record_reports(self, told: Sequence[WorkerReport]) -> None:
        def store() -> None:
            for one in told:
                self._report_to_ledger(one)

        told = [one for one in told if one.notes or one.reports]
        if told:
            self._fence()
            self._ledger.transaction(store)
        for one in told:
            if one.notes:  # as the ledger has them, which is told again at each start and end
                self._recorder.tag(one.number, status_tags(self._ledger.trial(one.number)))
            if one.reports:
                self._log(one.number, one.rows)
                self._show(one)

    def _report_to_ledger(self, told: WorkerReport) -> None:
        """Tell the ledger: a part of a transaction, which may be tried again."""
        others = self._spec.metrics[1:]
        if told.reports:
            self._ledger.report_all(
                told.number,
                [
                    LedgerReport(
                        one["epoch"],
                        one["step"],
                        one[OBJECTIVE],
                        [one["metrics"][metric] for metric in others],
                    )
                    for one in told.reports
                ],
            )
        for key, value in told.notes.items():
            self._ledger.set_attr(told.number, key, value)

    def _log(self, number: int, rows: Iterable[Row], *, ended: bool = False) -> None:
        self._recorder.log(number, thin_rows(rows, self._spec.tracking.every, ended=ended))

    def _log_the_rest(self, number: int) -> None:
        directory = self._paths.trial(number)
        self._recorder.log(number, [row for _, row in read_logged(directory)])
        self._log(number, read_rows(directory), ended=True)

    def _show(self, told: WorkerReport) -> None:
        for one in told.reports:
            self._view.reported(
                TrialProgress(told.number, told.params, one["epoch"], one["step"], one["metrics"])
            )

    def _end(
        self,
        number: int,
        end_of: Callable[[TrialRecord], tuple[Ending, str | None]],
        *,
        traceback: str | None = None,
        lineage: Sequence[PbtPerturbation] | None = None,
        last: WorkerReport | None = None,
    ) -> None:
        """Give a trial its end, in one transaction with what it told last.

        Args:
            end_of: Which one, and why.
            lineage: How it changed, where that is less than was decided.
            last: What it told last, unless that is written already.
        """

        def store() -> TrialRecord:
            if last is not None:
                self._report_to_ledger(last)
            ending, reason = end_of(self._ledger.trial(number))
            return self._ledger.finish(
                number, ending, reason=reason, traceback=traceback, lineage=lineage
            )

        self._fence()  # not within: a lock in a database may have to wait for the transaction
        record = self._ledger.transaction(store)
        for file, name in logged_files(self._paths.trial(number)):
            self._recorder.artifact(number, file, name)
        self._recorder.finish(number, STATUSES[record.state], end_tags(record, self._spec))
        if last is not None:
            self._show(last)
        self._view.ended(number, record.state, record.result, record.reason)
        self._on_end(record)
