"""Write the events of trials to the ledger, the recorder and the progress display.

The ledger comes first, because it is authoritative: a resume sends what the recorder then lacks,
and no record ever has to be retracted. Each write checks the lock, which another driver may have
acquired while this one was suspended. What must not live here: what an event means
(`tune_callbacks`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

from sweeps.errors import SpecError
from sweeps.ledger.attributes import LACKS_MODEL, SIGNALS, PbtPerturbation
from sweeps.ledger.ledger import LedgerReport
from sweeps.ledger.trials import Ending, TrialRecord
from sweeps.paths import TRIAL_CONFIG
from sweeps.reconcile.collect_state import trial_state
from sweeps.reconcile.failure_policy import Failure
from sweeps.reconcile.reconcile import end_of_stopped, end_of_training, unreported
from sweeps.reconcile.repairs import follow_log, follow_to_end, report_missing
from sweeps.recording.tags import (
    NOT_STOPPED,
    end_tags,
    lineage_tags,
    record_configuration,
    run_status,
    status_tags,
)
from sweeps.run.session import SweepSession
from sweeps.search.pbt_exploit import without_unbegun
from sweeps.spec.trial_run import RunStart
from sweeps.view.observer import ProgressObserver, TrialProgress, TrialStart
from tracking.outbox_status import read_outbox
from trainable.adapters.ray import OBJECTIVE
from trainable.store.metrics_file import logged_files
from trainable.store.regular_files import sync_file


@dataclass(frozen=True)
class WorkerReport:
    """One result of a worker, which holds one or more reports of a trial."""

    number: int
    params: Mapping[str, Any]
    result: Mapping[str, Any]
    """See `TuneTrial.step`."""
    notes: dict[str, Any] = field(default_factory=dict)
    """The trial's attributes in the ledger that this result changes."""

    @property
    def reports(self) -> list[Mapping[str, Any]]:
        """The reports in this result, in order."""
        last = [self.result] if OBJECTIVE in self.result else []
        return [*self.result.get("earlier", ()), *last]

    @property
    def signals(self) -> list[str] | None:
        """The health signals after the last report with new rows; None without new rows."""
        found: list[list[str]] = [one["signals"] for one in self.reports if "signals" in one]
        return found[-1] if found else None

    @property
    def trial_marks(self) -> dict[str, Any]:
        """What holds of the trial since this result, as its attributes in the ledger have it.

        Nothing is said of what no report tells: of health signals without new rows, or of the
        model without a new best state.
        """
        found: dict[str, Any] = {} if self.signals is None else {SIGNALS: self.signals}
        for report in self.reports:
            if "lacks_model" in report:
                found[LACKS_MODEL] = report["lacks_model"]
        return found


Entry = WorkerReport | Callable[[], None]
"""A queued write: the reports of a worker, or a function to call."""


class EventWriter:
    """Writes the events of trials."""

    def __init__(
        self,
        sweep: SweepSession,
        observer: ProgressObserver,
        seconds_of: Callable[[int], float | None],
    ) -> None:
        self._seconds_of = seconds_of
        self._spec, self._paths = sweep.spec, sweep.paths
        self._ledger, self._recorder, self._fence = sweep.ledger, sweep.recorder, sweep.fence
        self._observer = observer

    def write(self, entries: Sequence[Entry]) -> None:
        """Write queued entries in order; consecutive reports share one ledger transaction."""
        for is_report, group in groupby(
            entries, key=lambda entry: isinstance(entry, WorkerReport)
        ):
            if is_report:
                self._record_reports([entry for entry in group if isinstance(entry, WorkerReport)])
                continue
            for entry in group:
                assert not isinstance(entry, WorkerReport)
                entry()

    def open_run(self, number: int, start: RunStart, tags: Mapping[str, str]) -> None:
        """Open the run of a trial that starts for the first time."""
        tags = {"gradsweep.attempts": "1", **tags, **start.tags}
        self._recorder.start(number, start.params, tags)

    def record_first_start(self, number: int, params: Mapping[str, Any]) -> None:
        """Count the first attempt at a trial whose run is open."""
        self._fence()
        # Every counted attempt has its configuration on disk.
        sync_file(self._paths.trial(number) / TRIAL_CONFIG)
        attempt = self._ledger.start(number)
        record = self._ledger.trial(number)
        self._observer.started(TrialStart(number, params, attempt, record.role, record.origin))

    def record_restart(
        self, number: int, params: Mapping[str, Any], start: RunStart, step: int
    ) -> None:
        """Count an attempt, reopen the trial's run, and complete its reports."""
        self._fence()
        attempt = self._ledger.start(number)
        record = self._ledger.trial(number)
        tags = status_tags(record, self._spec) | start.tags
        # A trial that finishes another one starts with that trial's curve, also the first time.
        is_first = attempt == 1 and record.finishes is None
        if not is_first:
            tags |= NOT_STOPPED
        self._recorder.start(number, start.params, tags)
        if not is_first:
            queued = read_outbox(self._paths.outbox, number)
            known = trial_state(self._paths, self._spec, record, queued)
            # A lost worker may have stored reports that it could not send to the driver.
            report_missing(unreported(known), self._ledger)
            follow_log(known, self._spec, self._recorder)
        self._observer.started(
            TrialStart(number, params, attempt, record.role, record.origin, step)
        )

    def record_lost_worker(self, number: int, sentence: str) -> None:
        """Record why a worker was lost whose trial continues."""
        self._fence()
        self._ledger.add_lost_worker(number, sentence)
        self._observer.warned(number, sentence)

    def record_worker_info(self, report: WorkerReport) -> None:
        """Record the parameters and tags that only the worker knows, and damaged checkpoints."""
        noted = report.result.get("noted") or {}
        if params := noted.get("params"):
            self._recorder.start(report.number, params, {})
        resolved = report.result.get("resolved") or {}
        tags = {f"gradsweep.{key}": value for key, value in resolved.items()}
        tags |= noted.get("tags", {})
        damage = report.result.get("set_aside") or []
        if damage:
            tags["checkpoint.set_aside"] = "; ".join(damage)
        if tags:
            self._recorder.tag(report.number, tags)
        for sentence in damage:
            self._observer.warned(report.number, sentence)

    def seconds(self, number: int) -> float:
        """Return for how long workers have trained a trial, by the ledger."""
        return self._ledger.trial(number).seconds or 0.0

    def trial_marks(self, number: int) -> dict[str, Any]:
        """Return what the ledger has of a trial; see `WorkerReport.trial_marks`."""
        record = self._ledger.trial(number)
        return {SIGNALS: list(record.signals or ()), LACKS_MODEL: record.lacks_model}

    def promoted(self, number: int, start: RunStart) -> None:
        """Record that a paused trial resumes, perhaps with other parameters."""
        if tags := lineage_tags(self._ledger.trial(number), self._spec):
            self._recorder.start(number, start.params, tags | start.tags)
        self._observer.promoted(number)

    def paused(self, number: int) -> None:
        """Record that a trial waits at a rung."""
        self._record_seconds(number)
        self._observer.paused(number, self._ledger.trial(number).value)

    def record_interruption(self, number: int, tags: Mapping[str, str]) -> None:
        """Record that a trial was interrupted; it resumes with the sweep."""
        self._record_seconds(number)
        self._recorder.finish(number, "INTERRUPTED", tags)
        self._observer.ended(number, "interrupted", None, None)

    def finished(self, number: int, last: WorkerReport | None) -> None:
        """Record the end of a trial that made its last report."""

        def end(record: TrialRecord) -> tuple[Ending, str | None]:
            spec = self._spec
            return end_of_training(record.reports, spec.metrics[0], spec.select, spec.patience)

        self._end(number, end, last=last)

    def pruned(self, number: int, reason: str | None) -> None:
        """Record that the scheduler pruned a trial."""
        self._end(number, partial(self._end_of_stopped, reason))

    def stopped(self, number: int, reason: str) -> None:
        """Record that a running trial was stopped."""
        self._end(number, lambda _: ("pruned", reason))

    def stopped_waiting(self, number: int, reason: str) -> None:
        """Record that a waiting trial was stopped; do nothing if the trial has ended already."""
        record = self._ledger.trial(number)
        if record.finished:
            return
        record = without_unbegun(record, self._paths)
        self._recorder.start(number, record.params, {})
        self._end(number, partial(self._end_of_stopped, reason), lineage=record.lineage)

    def _end_of_stopped(
        self, reason: str | None, record: TrialRecord
    ) -> tuple[Ending, str | None]:
        spec = self._spec
        return end_of_stopped(record.reports, spec.metrics[0], spec.select, reason)

    def failed(self, number: int, failure: Failure) -> None:
        """Record that a trial failed."""
        self._end(number, lambda _: ("failed", failure.reason), traceback=failure.traceback)

    def refused(self, number: int, error: SpecError) -> None:
        """Record the failure of a trial whose parameter values make no valid configuration."""
        self._recorder.start(number, self._ledger.trial(number).params, {})
        self._end(number, lambda _: ("failed", f"config: {error}"))

    def _record_reports(self, results: Sequence[WorkerReport]) -> None:
        """Write results to the ledger in one transaction, then to the recorder and display."""

        def store() -> None:
            for one in results:
                self._report_to_ledger(one)

        results = [one for one in results if one.notes or one.reports]
        if results:
            self._fence()
            self._ledger.transaction(store)
        for one in results:
            if one.notes:  # send the ledger's values; each start and end sends them again
                self._recorder.tag(
                    one.number, status_tags(self._ledger.trial(one.number), self._spec)
                )
            if one.reports:
                every, step = self._spec.tracking.every, one.reports[-1]["step"]
                self._recorder.follow(one.number, step, every=every)
                self._show(one)

    def _report_to_ledger(self, report: WorkerReport) -> None:
        """Write one result to the ledger, as part of a transaction that may be retried."""
        others = self._spec.reported[1:]
        if report.reports:
            self._ledger.report_all(
                report.number,
                [
                    LedgerReport(
                        one["epoch"],
                        one["step"],
                        one[OBJECTIVE],
                        [one["metrics"][metric] for metric in others],
                        self._seconds_of(report.number),
                    )
                    for one in report.reports
                ],
            )
        for key, value in report.notes.items():
            self._ledger.set_attr(report.number, key, value)

    def _record_seconds(self, number: int) -> None:
        seconds = self._seconds_of(number)
        if seconds is not None:
            self._fence()
            self._ledger.store_trial_seconds(number, seconds)

    def _show(self, report: WorkerReport) -> None:
        for one in report.reports:
            self._observer.reported(
                TrialProgress(
                    report.number, report.params, one["epoch"], one["step"], one["metrics"]
                )
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
        """Write a trial's end in one transaction with its final report."""

        def store() -> TrialRecord:
            if last is not None:
                self._report_to_ledger(last)
            ending, reason = end_of(self._ledger.trial(number))
            return self._ledger.finish(
                number,
                ending,
                reason=reason,
                traceback=traceback,
                lineage=lineage,
                seconds=self._seconds_of(number),
            )

        # Check outside the transaction: the check of a database lock could wait for its end.
        self._fence()
        record = self._ledger.transaction(store)
        follow_to_end(record, self._spec, self._recorder)
        for file, name in logged_files(self._paths.trial(number)):
            self._recorder.artifact(number, file, name)
        self._recorder.finish(
            number, run_status(record), end_tags(record, self._spec, self._paths)
        )
        if self._spec.repeats.seeds > 1:
            record_configuration(self._ledger.trials()[record.search_number], self._recorder)
        if last is not None:
            self._show(last)
        self._observer.ended(number, record.state, record.result, record.reason)


_BATCH_SECONDS = 0.1
"""How long the thread waits for further entries to write in the same batch."""
_MOST = 500
"""How many entries may wait in memory; `put` blocks while there are more."""

_T = TypeVar("_T")


class WriteQueue(Generic[_T]):
    """Writes queued entries in a background thread.

    After an error no further entry is written, and every call but `close` raises that error again.
    """

    def __init__(self, write: Callable[[Sequence[_T]], None]) -> None:
        self._write = write
        self._waiting: queue.Queue[_T | None] = queue.Queue(_MOST)
        """None ends the thread."""
        self._hurried = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, entry: _T) -> None:
        """Queue an entry; blocks only while the thread is far behind."""
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
            self._thread.start()
        self._waiting.put(entry)
        self.check()

    def check(self) -> None:
        """Raise the error of an earlier write, if there is one."""
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Wait until all queued entries are written, or raise the error of a write."""
        self._hurried.set()
        self._waiting.join()
        self._hurried.clear()
        self.check()

    def close(self) -> None:
        """Write the queued entries, if no write fails, and end the thread."""
        self._hurried.set()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        is_last = False
        while not is_last:
            batch = [self._waiting.get()]
            self._hurried.wait(_BATCH_SECONDS)
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._waiting.get_nowait())
            is_last = batch[-1] is None
            entries = [entry for entry in batch if entry is not None]
            try:
                if entries and self._error is None:
                    self._write(entries)
            except BaseException as raised:  # including a lost lock; the next call raises it again
                self._error = raised
            for _ in batch:
                self._waiting.task_done()
