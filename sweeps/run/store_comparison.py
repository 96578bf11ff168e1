"""Compare what a tracking store holds of a sweep with the sweep's own files; nothing is changed.

What must not live here: the comparison of each run (`reconcile.store_check`), and sending
what the store lacks (`run.sync`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping

from sweeps.artifacts.trial_figures import figure_files
from sweeps.engine.process_cleanup import untagged_env
from sweeps.ledger.reader import LedgerReader
from sweeps.paths import SweepPaths
from sweeps.reconcile.store_check import (
    ExpectedRun,
    ExpectedSweep,
    MissingData,
    check_all,
    check_runs,
    lost_runs,
)
from sweeps.recording.descriptions import DESCRIPTION, describe_sweep
from sweeps.recording.tags import (
    STOPPED_BY_INTERRUPT,
    attempt_tags,
    best_tags,
    curve_tags,
    front_tags,
    health_tags,
)
from sweeps.spec.revisions import read_revisions
from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import flatten
from sweeps.stores import find_tracker
from sweeps.view.outcome import find_failure
from sweeps.view.sweep_view import SweepView
from tracking.outbox_status import DeliveryStatus, read_outbox
from tracking.recorder import Status, stored_status
from tracking.tracker import StoreUnreadable, Tracker

_INTERRUPTED: Status = "INTERRUPTED"


def is_concluded(ledger: LedgerReader) -> bool:
    """Return whether a driver has published the best of all trials."""
    return 0 < ledger.num_published == len(ledger.trials)


class StoreComparison:
    """Finds what a tracking store lacks of a sweep."""

    def __init__(
        self,
        paths: SweepPaths,
        spec: SweepSpec,
        tracked_sweep_status: str | None,
        tracker: Tracker,
    ) -> None:
        self._paths, self._spec = paths, spec
        self._ledger = LedgerReader(paths.ledger)
        self.sweep_id = self._ledger.sweep_id
        self.records = self._ledger.records()
        self._concluded = is_concluded(self._ledger)
        self._best = self._ledger.best() if len(spec.metrics) == 1 else None
        if tracked_sweep_status is None and self._concluded:
            tracked_sweep_status = "FINISHED" if self._ledger.front() else "FAILED"
        endings: tuple[Status, ...] = ("FINISHED", "FAILED")
        self._ending = next((one for one in endings if one == tracked_sweep_status), _INTERRUPTED)
        self.densities = [one.tracking.every for one in read_revisions(paths.spec)]
        known = read_outbox(paths.outbox).experiment_id
        self.store = tracker.reader(spec.name, known)

    def missing_runs(self) -> list[MissingData]:
        """Return the runs that the store lacks or has with another status."""
        delivered = read_outbox(self._paths.outbox)
        runs = self.store.runs(self.sweep_id)
        return check_runs(self.records, delivered, runs, self._status(delivered))

    def all_missing(self) -> list[MissingData]:
        """Return everything that the store lacks of the delivered records."""
        params = dict(flatten(self._spec.model_dump(mode="json")))
        delivered = read_outbox(self._paths.outbox)
        expected = ExpectedSweep(
            paths=self._paths,
            spec=self._spec,
            records=self.records,
            own_run=ExpectedRun(params, self._sweep_tags(), self._sweep_files()),
            own_status=self._status(delivered),
            every=math.lcm(*self.densities),
            more_tags=self._front_tags(),
            drawn=lambda number: figure_files(self._paths, number),
        )
        return check_all(expected, self.store, self.sweep_id)

    def _status(self, delivered: DeliveryStatus) -> str | None:
        """Return the status of the sweep's own run; None: a killed driver did not send it."""
        return None if delivered.tracked_sweep_status == "RUNNING" else stored_status(self._ending)

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
        files = {"": {"sweep.yaml"}}
        if self._concluded and self._best is not None:
            files["best"] = {"config.yaml"}
            files["figures"] = {f.name for f in figure_files(self._paths, self._best.number)}
        return {folder: frozenset(names) for folder, names in files.items()}


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


def warn_of_other_sweeps(paths: SweepPaths, spec: SweepSpec, warn: Callable[[str], None]) -> None:
    """Warn that the experiment of a new sweep has runs of other sweeps."""
    tracker = find_tracker(paths, spec)
    with contextlib.suppress(StoreUnreadable):  # the sweep can run without this warning
        if others := tracker.other_sweeps(spec.name):
            ids = ", ".join(f"{one} ({count} runs)" for one, count in others.items())
            warn(
                f"the tracking store has runs of earlier sweeps named '{spec.name}'; the tag "
                f"gradsweep.sweep_id tells sweeps apart: {ids}; {paths.command('ui')} shows only "
                "the runs of this sweep"
            )
