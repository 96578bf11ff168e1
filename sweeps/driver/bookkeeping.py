"""Writing down what happened to trials: to the recorder, the ledger and the view.

A trial that the ledger calls finished is never looked at again, so its end must already lie in
the recorder's durable queue by then; one that dies between the two is simply finished once more.
Before anything is written the lock is looked at: a driver that stood still may have been replaced
meanwhile. What must not live here: what it means that something happened (`callbacks`), and in
which thread it is written (`writing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from sweeps.early_stopping.exploit import without_unbegun
from sweeps.early_stopping.failures import Failure
from sweeps.layout import SweepPaths
from sweeps.ledger.ledger import (
    ACCUMULATION,
    SIGNALS,
    Ending,
    Ledger,
    Report,
    TrialRecord,
)
from sweeps.ledger.view import Mutation
from sweeps.reconciliation.corrections import catch_up
from sweeps.reconciliation.facts import trial_facts
from sweeps.reconciliation.reconcile import STATUSES, end_of_training, missed
from sweeps.recording.curves import recorded
from sweeps.recording.tags import NOT_STOPPED, end_tags, lineage_tags
from sweeps.results.running import Progress, View
from sweeps.spec.parameters import searched
from sweeps.spec.spec import SpecError, SweepSpec
from tracking.outbox_status import read_outbox
from tracking.recorder import Recorder
from trainable.history import Row, read_rows
from trainable.ray_adapter import OBJECTIVE


@dataclass(frozen=True)
class Told:
    """What a worker told of a trial."""

    number: int
    params: Mapping[str, Any]
    result: Mapping[str, Any]
    """See `TuneTrial.step`."""
    accumulation: int | None = None
    """Into how many micro-batches its batches are split from now on, where that is news."""

    @property
    def reports(self) -> list[Mapping[str, Any]]:
        """The reports that came together, in order."""
        last = [self.result] if OBJECTIVE in self.result else []
        return [*self.result.get("earlier", ()), *last]

    @property
    def rows(self) -> list[Row]:
        """What was trained up to the last of them."""
        return [Row(*row) for report in self.reports for row in report["rows"]]


Entry = Told | Callable[[], None]
"""What waits to be written."""


class Books:
    """Writes down what happened to trials.

    Args:
        spec: The sweep.
        paths: Where each trial's directory is.
        fence: Called right before anything is written; raises when another driver may run the
            sweep by now.
        on_end: Called with the record of each trial that has its end.
    """

    def __init__(
        self,
        spec: SweepSpec,
        paths: SweepPaths,
        ledger: Ledger,
        recorder: Recorder,
        view: View,
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
        self._signals: dict[int, list[str]] = {}  # as they were noted last

    def write(self, entries: Sequence[Entry]) -> None:
        """Write what waits, in order; reports that follow each other wait for the disk once."""
        for reports, some in groupby(entries, key=lambda entry: isinstance(entry, Told)):
            if reports:
                self._told([entry for entry in some if isinstance(entry, Told)])
                continue
            for entry in some:
                assert not isinstance(entry, Told)
                entry()

    def started(
        self, number: int, params: Mapping[str, Any], parameters: Mapping[str, object]
    ) -> None:
        """Count the attempt, open the trial's run, and catch up on what a worker stored and could
        not tell before it was lost.

        Args:
            params: The trial's.
            parameters: What of its configuration is recorded.
        """
        self._fence()
        attempt = self._ledger.start(number)
        tags = {"gradsweep.attempts": str(attempt), **lineage_tags(self._ledger.trial(number))}
        self._recorder.start(number, parameters, tags if attempt == 1 else tags | NOT_STOPPED)
        if attempt > 1:
            known = trial_facts(
                self._paths,
                self._spec,
                self._ledger.trial(number),
                read_outbox(self._paths.outbox),
            )
            catch_up(missed(known), self._ledger, self._recorder)
        self._view.started(number, params, attempt)

    def promoted(self, number: int, parameters: Mapping[str, object]) -> None:
        """A paused trial goes on, perhaps with other parameters."""
        self._fence()
        if told := lineage_tags(self._ledger.trial(number)):
            self._recorder.start(number, parameters, told)
        self._view.promoted(number)

    def paused(self, number: int) -> None:
        """A trial waits at a rung."""
        self._view.paused(number, self._ledger.trial(number).value)

    def interrupted(self, number: int, tags: Mapping[str, str]) -> None:
        """A trial goes on when the sweep does."""
        self._fence()
        self._recorder.finish(number, "KILLED", tags)
        self._view.ended(number, "interrupted", None, None)

    def finished(self, number: int, last: Told | None) -> None:
        """A trial was trained to its last epoch.

        Args:
            last: What it told with that, where it is not written yet.
        """

        def end(record: TrialRecord) -> tuple[Ending, str | None]:
            return end_of_training(record.reports, self._spec.metrics[0])

        notes = None
        if last is not None:
            self._fence()
            notes = self._tag(last)
            self._log(number, last.rows)  # before its end; nobody trains these again
        self._end(number, end, last=last, notes=notes)

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
        self._fence()
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
        self._fence()
        self._recorder.start(number, searched(self._ledger.trial(number).params), {})
        self._log_the_rest(number)  # of what it was before the spec changed
        self._end(number, lambda _: ("failed", f"config: {error}"))

    def _told(self, told: Sequence[Told]) -> None:
        self._fence()
        notes = [self._tag(one) for one in told]

        def store() -> None:
            for one, noted in zip(told, notes, strict=True):
                self._store(one, noted)

        if any(notes) or any(one.reports for one in told):
            self._ledger.at_once(store)
        for one in told:
            if one.reports:
                self._log(one.number, one.rows)
                self._show(one)

    def _tag(self, told: Told) -> dict[str, Any]:
        """Tell what a run says of itself; returns what the ledger is to note of it."""
        number, notes = told.number, dict[str, Any]()
        resolved = told.result.get("resolved") or {}
        tags = {f"gradsweep.{key}": value for key, value in resolved.items()}
        damaged = told.result.get("set_aside") or []
        if damaged:
            tags["checkpoint.set_aside"] = "; ".join(damaged)
        if told.accumulation is not None:
            notes[ACCUMULATION] = told.accumulation
            tags[f"gradsweep.{ACCUMULATION}"] = str(told.accumulation)
        # Those of a report without rows were told before.
        looked = [one.get("signals", []) for one in told.reports if one["rows"]]
        if looked and number not in self._signals:
            self._signals[number] = list(self._ledger.trial(number).signals)
        if looked and looked[-1] != self._signals[number]:  # also when all is well again
            notes[SIGNALS] = self._signals[number] = looked[-1]
            tags["health"] = "; ".join(looked[-1])
        if tags:
            self._recorder.tag(number, tags)
        for sentence in damaged:
            self._view.warned(number, sentence)
        return notes

    def _store(self, told: Told, notes: Mapping[str, Any]) -> None:
        """Tell the ledger: a part of a transaction, which may be tried again."""
        others = self._spec.metrics[1:]
        if told.reports:
            self._ledger.report_all(
                told.number,
                [
                    Report(
                        one["epoch"],
                        one["step"],
                        one[OBJECTIVE],
                        [one["metrics"][metric] for metric in others],
                    )
                    for one in told.reports
                ],
            )
        for key, value in notes.items():
            self._ledger.note(told.number, key, value)

    def _log(self, number: int, rows: Iterable[Row], *, ended: bool = False) -> None:
        self._recorder.log(number, recorded(rows, self._spec.tracking.every, ended=ended))

    def _log_the_rest(self, number: int) -> None:
        rows = read_rows(self._paths.trial(number))
        self._fence()
        self._log(number, rows, ended=True)

    def _show(self, told: Told) -> None:
        for one in told.reports:
            self._view.reported(
                Progress(told.number, told.params, one["epoch"], one["step"], one["metrics"])
            )

    def _end(
        self,
        number: int,
        end_of: Callable[[TrialRecord], tuple[Ending, str | None]],
        *,
        traceback: str | None = None,
        lineage: Sequence[Mutation] | None = None,
        last: Told | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Give a trial its end, in one transaction with what it told last.

        Args:
            end_of: Which one, and why.
            lineage: How it changed, where that is less than was decided.
            last: What it told last, unless that is written already.
            notes: What is noted of that.
        """
        is_recorded = False

        def store() -> TrialRecord:
            nonlocal is_recorded
            if last is not None:
                self._store(last, notes or {})
            record = self._ledger.trial(number)
            ending, reason = end_of(record)
            if not is_recorded:  # the transaction may be tried again
                record = replace(record, state=ending, reason=reason, traceback=traceback)
                self._recorder.finish(number, STATUSES[ending], end_tags(record, self._spec))
                is_recorded = True
            return self._ledger.finish(
                number, ending, reason=reason, traceback=traceback, lineage=lineage
            )

        self._fence()
        record = self._ledger.at_once(store)
        if last is not None:
            self._show(last)
        self._view.ended(number, record.state, record.result, record.reason)
        self._on_end(record)
