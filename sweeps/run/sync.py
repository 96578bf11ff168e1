"""Deliver queued records, draw missing figures, and compare the tracking store.

Only for sweeps without a driver, which delivers by itself. What must not live here: the delivery
(`tracking`), and the search for missing data (`store_comparison`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from sweeps.artifacts.export import Standing, draw_report, export_trial
from sweeps.artifacts.trial_figures import (
    DrawnTrial,
    draw_figures,
    figure_files,
    record_figures,
    record_figures_again,
    trials_without_figures,
)
from sweeps.engine.process_cleanup import end_orphans
from sweeps.errors import NoReport
from sweeps.ledger.over_seeds import weights_of
from sweeps.ledger.reader import LedgerReader
from sweeps.paths import SCRATCH, SweepPaths
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.reconcile import tracking_gaps
from sweeps.reconcile.repairs import follow_logs, send_to_tracker
from sweeps.recording.tags import STOPPED_BY_INTERRUPT, curve_tags, open_recorder
from sweeps.run.store_comparison import Missing, MissingData, StoreComparison, is_concluded
from sweeps.spec.revisions import read_revisions
from sweeps.spec.spec import SweepSpec
from sweeps.stores import (
    check_below_root,
    check_kept,
    check_no_copy,
    deliver_waiting,
    find_tracker,
)
from sweeps.sweep_lock import SweepLock
from sweeps.view.sweep_view import NoBest, SweepView
from tracking.notifications import Undelivered
from tracking.outbox_status import read_outbox
from tracking.recorder import Recorder, reset_trials, set_target, sync

_BATCH_SIZE = 50
"""How many trials' metrics are in memory at a time."""
_PATIENCE = 30.0
"""After how many seconds without a delivery a tracking server counts as down."""


class SyncResult(NamedTuple):
    """What `sweep sync` delivered, drew and found missing."""

    delivered: int
    left: int
    """How many records still wait."""
    refused: int
    """How many records the server has rejected for good, since the sweep began."""
    held: str | None
    """How many artifacts wait although the server answers, and why."""
    drawn: int
    """For how many trials figures were drawn."""
    missing: Missing = Missing()
    """What the store lacked of the records that had been delivered."""
    still_missing: Missing = Missing()
    """What it still lacks."""
    num_runs: int = 0
    """How many runs the store should have."""
    undelivered: Undelivered | None = None
    """The notifications that still wait for the webhook; None if none does."""

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            **self._asdict(),
            "missing": asdict(self.missing),
            "still_missing": asdict(self.still_missing),
            "undelivered": self.undelivered._asdict() if self.undelivered else None,
        }


def deliver(view: SweepView, *, verify: bool = False) -> SyncResult:
    """Deliver queued records, those of a killed driver, lost runs, figures and the report."""
    paths, spec = view.paths, view.spec
    check_kept(paths, spec, spec)
    check_no_copy(paths, spec, view.ledger.run_from)
    tracker = find_tracker(paths, spec)
    check_below_root(paths, spec)
    place = tracker.uri, tracker.artifact_root
    lock = SweepLock(paths.lock)
    with contextlib.ExitStack() as stack:
        drawing = Drawing()
        if view.state != "running":  # otherwise the lock cannot be acquired
            scratch = tempfile.TemporaryDirectory(dir=paths.directory, prefix=SCRATCH)
            drawing = draw_missing(view, Path(stack.enter_context(scratch)))
        lock.acquire()
        stack.callback(lock.release)
        if lock.previous is not None:
            end_orphans(lock.previous.token)
        undelivered = deliver_waiting(paths, spec, seconds=_PATIENCE)
        tracker.probe(known=spec.tracking.uri is None)
        resender = _Resender(paths, spec, tracker)
        set_target(paths.outbox, tracker)
        drawn = record_drawing(paths, spec, drawing)
        before = read_outbox(paths.outbox)
        sent = left = 0

        def send() -> None:
            nonlocal sent, left
            waiting = read_outbox(paths.outbox).pending
            left = sync(*place, spec.name, resender.sweep_id, paths.outbox, patience=_PATIENCE)
            sent += waiting - left

        still: list[MissingData] = []
        if verify:
            send()  # queued records are not missing
            missing = [] if left else resender.all_missing()
            resender.send(missing)
            send()
            still = resender.all_missing() if missing and not left else []
        else:
            missing = resender.missing_runs()
            # A user deleted the runs in the trash; they stay there.
            still = [one for one in missing if one.is_deleted]
            resender.send([one for one in missing if not one.is_deleted])
            send()
    after = read_outbox(paths.outbox)
    num_refused = after.refused - before.refused
    return SyncResult(
        sent - num_refused,
        left,
        after.refused,
        after.blocked_artifacts,
        drawn,
        Missing.of(one for one in missing if not one.is_new),
        Missing.of(still),
        1 + len(resender.records),
        undelivered if undelivered and undelivered.waiting else None,
    )


def queue_interruptions(paths: SweepPaths, spec: SweepSpec) -> None:
    """Queue the records that a killed driver could not send, and mark its runs as interrupted.

    The caller holds the sweep's lock.
    """
    ledger = LedgerReader(paths.ledger)
    records = {record.number: record for record in ledger.records()}
    looks_live = read_outbox(paths.outbox).tracked_sweep_status == "RUNNING"
    recorder = _queue(paths, spec, ledger)
    for first in range(0, len(records), _BATCH_SIZE):
        batch = list(records.values())[first : first + _BATCH_SIZE]
        state = read_sweep_state(paths, spec, batch, live=False)
        follow_logs(state, spec, recorder)
        for gap in list(tracking_gaps(state)):
            send_to_tracker(gap, paths, spec, records[gap.number], recorder)
    if looks_live:
        recorder.finish(None, "INTERRUPTED", STOPPED_BY_INTERRUPT)
    recorder.close(0.0)


class Drawing(NamedTuple):
    """Figures and a report in a scratch directory that are not recorded yet."""

    figures: Sequence[DrawnTrial] = ()
    report: Path | None = None
    no_report: str | None = None
    """Why the report could not be drawn."""


def draw_missing(view: SweepView, scratch: Path) -> Drawing:
    """Draw missing figures of the trials that have ended, and the report of a concluded sweep.

    Needs no lock, because trials that have ended do not change.
    """
    paths = view.paths
    figures = draw_figures(view.spec, paths, trials_without_figures(paths, view.records), scratch)
    # A trial that ended after the last report has no figures either.
    if not is_concluded(view.ledger) or (paths.report.exists() and not figures):
        return Drawing(figures)
    try:
        return Drawing(figures, draw_report(paths, scratch / paths.report.name))
    except NoReport as error:
        return Drawing(figures, no_report=str(error))


def record_drawing(paths: SweepPaths, spec: SweepSpec, drawing: Drawing) -> int:
    """Queue the figures for the trials' runs, and report and best figures for the sweep's own run.

    The caller holds the sweep's lock.
    """
    ledger = LedgerReader(paths.ledger)
    recorder = _queue(paths, spec, ledger)
    all_again = recorder.needs_figures
    # Before the figures: after a crash here, figures are missing, and the report is drawn again.
    if drawing.report is not None:
        drawing.report.replace(paths.report)
    if drawing.report is not None or (all_again and paths.report.exists()):
        recorder.artifact(None, paths.report, paths.report.name)
    if all_again:
        record_figures_again(paths, [one.number for one in ledger.trials], recorder)
    num_drawn = record_figures(paths, drawing.figures, recorder)
    best = ledger.best() if len(spec.metrics) == 1 and is_concluded(ledger) else None
    if best and (all_again or best.number in [one.number for one in drawing.figures]):
        for file in figure_files(paths, best.number):
            recorder.artifact(None, file, f"figures/{file.name}")
    if all_again:
        recorder.figures_sent()
    if drawing.no_report is not None:
        recorder.tag(None, {"report": f"missing: {drawing.no_report}"})
    recorder.close(0.0)
    return num_drawn


class _Resender(StoreComparison):
    """Finds the records that the store lacks and queues them again; the caller holds the lock."""

    def send(self, missing: Iterable[MissingData]) -> None:
        """Queue missing records, and those that a killed driver could not send."""
        by_trial = {one.trial: one for one in missing}
        again = {one.trial: one.is_gone for one in by_trial.values() if one.is_of_the_run}
        reset_trials(self._paths.outbox, again)
        own = by_trial.pop(None, None)
        if own is not None:
            self._send_sweep_run(own)
        queue_interruptions(self._paths, self._spec)
        more = self._front_tags()
        recorder = _queue(self._paths, self._spec, self._ledger)
        for number, one in by_trial.items():
            assert number is not None, "the sweep's own run is handled above"
            recorder.tag(number, more.get(number, {}))
            files = figure_files(self._paths, number)
            for file in files:
                if one.is_gone or f"figures/{file.name}" in one.files:
                    recorder.artifact(number, file, f"figures/{file.name}")
            if files and one.is_gone:
                recorder.tag(number, {"figures": "drawn"})
        if any(again.values()):
            recorder.figures_sent()  # above, of each run that is gone
        recorder.close(0.0)

    def _send_sweep_run(self, missing: MissingData) -> None:
        recorder = _queue(self._paths, self._spec, self._ledger, announce=missing.is_of_the_run)
        if missing.is_of_the_run:
            recorder.finish(None, self._ending, self._sweep_tags(), at_ms=self._ended_ms())
        with tempfile.TemporaryDirectory(dir=self._paths.directory, prefix=SCRATCH) as made:
            for file, name in self._publish(Path(made), missing):
                recorder.artifact(None, file, name)
        recorder.close(0.0)

    def _publish(self, directory: Path, missing: MissingData) -> Iterable[tuple[Path, str]]:
        """Yield the missing artifacts of the sweep's own run, with their names in the store."""

        def lacks(name: str) -> bool:
            return missing.is_gone or any(one.startswith(name) for one in missing.files)

        if lacks("sweep.yaml"):
            yield self._paths.spec, "sweep.yaml"
        if self._paths.report.exists() and lacks("report.html"):
            yield self._paths.report, "report.html"
        if not self._concluded or self._best is None:
            return
        for file in figure_files(self._paths, self._best.number):
            if lacks(f"figures/{file.name}"):
                yield file, f"figures/{file.name}"
        if lacks("best/"):
            with contextlib.suppress(NoBest):  # the driver exported no trial either
                for file in export_trial(
                    self._paths,
                    self._spec,
                    weights_of(self._best, self.records),
                    directory / "best",
                    Standing.of(self._ledger.attempts, self.records),
                ):
                    yield file, f"best/{file.name}"

    def _ended_ms(self) -> int | None:
        return max((one.ended_ms or 0 for one in self.records), default=0) or None


def _queue(
    paths: SweepPaths, spec: SweepSpec, ledger: LedgerReader, *, announce: bool = False
) -> Recorder:
    """Return a recorder that writes to the outbox and contacts no server."""
    tags = None
    if announce:
        tags = curve_tags([one.tracking.every for one in read_revisions(paths.spec)])
    return open_recorder(paths, spec, ledger, tags=tags)
