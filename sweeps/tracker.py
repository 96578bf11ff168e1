"""Open the tracker of a sweep. No other module of `sweeps` chooses a tracking service.

What must not live here: what is recorded (`recording`), and the services (`tracking.trackers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from sweeps.paths import SweepPaths, tracking_place
from sweeps.recording.tags import attempt_tags, leaders_views
from sweeps.spec.logged_params import flatten
from sweeps.spec.spec import SweepSpec
from sweeps.store_access import reach_tracking
from tracking.outbox_recorder import open_recorder
from tracking.tracker import OpenTracker, TrackedSweep, Tracker
from tracking.trackers import choose_tracker


def check_address(spec: SweepSpec) -> None:
    """Check that the tracking address of a spec names a store, without contacting it."""
    if spec.tracking.uri is not None:
        choose_tracker(spec.tracking.uri).check_address()


def find_tracker(paths: SweepPaths, spec: SweepSpec) -> Tracker:
    """Return the tracker of a sweep, to be connected to."""
    return choose_tracker(*reach_tracking(paths, spec))


def tracker_at(uri: str | None, root: Path) -> Tracker:
    """Return the tracker for an address, whether or not it may be connected to."""
    return choose_tracker(*tracking_place(uri, root))


class SweepAttempts(Protocol):
    """The part of a ledger that identifies a sweep and its drivers."""

    @property
    def sweep_id(self) -> str:
        """The sweep's id."""
        ...

    @property
    def attempts(self) -> Sequence[Mapping[str, str]]:
        """The provenance of each driver."""
        ...


def open_tracker(
    paths: SweepPaths,
    spec: SweepSpec,
    ledger: SweepAttempts,
    *,
    tags: Mapping[str, str],
    announce: bool = True,
    environment: Mapping[str, str] | None = None,
) -> OpenTracker:
    """Open the recorder of a sweep and its delivery; `tags` besides those of its attempts."""
    offline = environment is None
    tracker = tracker_at(spec.tracking.uri, paths.root) if offline else find_tracker(paths, spec)
    attempts = ledger.attempts
    sweep = TrackedSweep(
        experiment=spec.name,
        sweep_id=ledger.sweep_id,
        outbox=paths.outbox,
        tags={**attempt_tags(attempts), **tags},
        params=dict(flatten(spec.model_dump(mode="json"))),
        inherited=attempts[-1] if attempts else {},
        experiment_tags=leaders_views(spec, ledger.sweep_id),
    )
    return open_recorder(tracker, sweep, announce=announce, environment=environment)
