"""Delivering an outbox to a tracking server, so that each (run, key, step) arrives exactly once.

The rule: after anything but a clean acknowledgement nothing is assumed. The next attempt looks for
the runs again by their tags, and compares metric records that were in flight with what the server
holds. What must not live here: MLflow (see `tracking.mlflow_server`), threads and waiting (see
`tracking.outbox_recorder`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from redaction.secrets import redact
from tracking.batching import Batch
from tracking.limits import MAX_TAG_VALUE, clean_key, clip_text
from tracking.metric_points import INFINITE_PREFIX, HighWaterMarks, Point, Request
from tracking.outbox import SWEEP, Outbox
from tracking.recorder import CHANGED_PREFIX, PARAM_PREFIX, as_number

logger = logging.getLogger("tracking")

TAG_SWEEP = "gradsweep.sweep_id"
TAG_TRIAL = "gradsweep.trial"
TAG_ROLE = "gradsweep.role"
TAG_PARENT = "mlflow.parentRunId"
TAG_NAME = "mlflow.runName"

_MAX_REFUSALS = 2
_PREPARED_AT_ONCE = 16
"""Trials whose metrics are marked together: more wait for the disk less often, but hold up appends
for longer, and a kill leaves more to compare with the server."""


class RecordRejected(Exception):
    """The server understood a request and will not take its content, now or later."""


class RunGone(Exception):
    """The server does not have the run."""


class NotStored(Exception):
    """An artifact could not be stored, by a server that answers: only artifacts need to wait."""


@dataclass(frozen=True)
class FoundRun:
    """A run of this sweep as a search returns it."""

    run_id: str
    trial: int
    """The trial's number, or `SWEEP`."""
    start_ms: int
    deleted: bool = False
    """In the server's trash: can be restored."""
    empty: bool = False
    """Holds neither parameters nor metrics."""


@dataclass(frozen=True)
class RunState:
    """What a server holds for one run."""

    status: str
    params: dict[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    """The metrics with at least one value."""
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: str = ""
    """Where its artifacts lie."""


class TrackingServer(Protocol):
    """What delivery needs of a tracking server.

    Every method may raise anything. `RecordRejected` and `RunGone` have meanings of their own; any
    other exception means that the outcome is unknown.
    """

    def open_experiment(self, known: str | None) -> str:
        """Find, restore or create the experiment; returns its id.

        Args:
            known: The id of the one used before, which may have another name by now, or be of
                another server.
        """
        ...

    def find_runs(self, experiment_id: str) -> list[FoundRun]:
        """All runs of the sweep, deleted ones included."""
        ...

    def create_run(self, experiment_id: str, start_ms: int, tags: Mapping[str, str]) -> str:
        """Create a run; returns its id."""
        ...

    def restore_run(self, run_id: str) -> None:
        """Take a run out of the trash."""
        ...

    def delete_run(self, run_id: str) -> None:
        """Put a run into the trash."""
        ...

    def read_run(self, run_id: str) -> RunState:
        """Read status, parameters, metric names, tags, and where artifacts lie."""
        ...

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """All values of one metric, as (step, value)."""
        ...

    def log(self, run_id: str, request: Request) -> None:
        """Write parameters that the run does not have yet, then points, then tags.

        One that fails may have written what comes before, and part of what it failed at.
        """
        ...

    def set_experiment_tags(self, experiment_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of the experiment."""
        ...

    def set_status(self, run_id: str, status: str, end_ms: int | None) -> None:
        """Set the status, and the end time where one is given."""
        ...

    def upload(self, run_id: str, path: Path, folder: str) -> None:
        """Store a file under the artifact path `folder`."""
        ...


class Delivery:
    """Takes records from an outbox to a server. Used by one thread.

    Args:
        sweep_id: Goes into every run's tags.
        name: Of the sweep's own run.
    """

    def __init__(
        self, outbox: Outbox, server: TrackingServer, *, sweep_id: str, name: str
    ) -> None:
        self._outbox = outbox
        self._server = server
        self._sweep_id = sweep_id
        self._name = name
        self._experiment_id: str | None = None
        self._found: dict[int, FoundRun] = {}
        self._open: dict[int, str] = {}
        self._held: dict[tuple[str, str], set[int]] = {}
        self._refusals: dict[tuple[int, bool], int] = {}
        """By trial, and whether it is an artifact."""
        self._uploaded = SWEEP - 1
        """The trial of which an artifact was tried last."""

    def connect(self) -> None:
        """Find the experiment and all runs of the sweep, unless they are known from before."""
        if self._experiment_id is not None:
            return
        experiment_id = self._server.open_experiment(self._outbox.experiment_id)
        known = self._outbox.runs()
        self._found = self._choose(self._server.find_runs(experiment_id), known)
        for trial, run_id in known.items():
            found = self._found.get(trial)
            if found is None or found.run_id != run_id:
                logger.warning("run %s of %s is gone from the server", run_id, _describe(trial))
                self._outbox.reset_run(trial)
        self._outbox.found(experiment_id)
        self._experiment_id = experiment_id

    def disconnect(self) -> None:
        """Assume nothing about the server any more."""
        self._experiment_id = None
        self._open.clear()
        self._held.clear()

    def search_again(self) -> None:
        """Look for all runs of the sweep anew: a create without an answer may have arrived."""
        self.disconnect()
        self.connect()

    def drain(self, stop: Callable[[], bool], *, uploads: bool = True) -> None:
        """Deliver until the outbox is empty or `stop` says so: one batch of each trial in turn,
        and one artifact after each round.

        Args:
            uploads: False leaves the artifacts in the outbox.

        Raises:
            NotStored: An artifact could not be stored; all else can be delivered.
            Exception: Whatever the server raised; call `disconnect` before the next attempt.
        """
        while True:
            trials = self._outbox.trials()
            for first in range(0, len(trials), _PREPARED_AT_ONCE):
                some = trials[first : first + _PREPARED_AT_ONCE]
                self._outbox.prepare(each for each in some if (each, False) not in self._refusals)
                for trial in some:
                    if stop():
                        return
                    single = (trial, False) in self._refusals
                    if (batch := self._outbox.next_batch(trial, single=single)) is not None:
                        self._attempt(batch)
            artifact = self._outbox.claim_artifact(self._uploaded) if uploads else None
            if artifact is not None:
                self._uploaded = artifact.trial
                self._attempt(artifact)
                if stop():
                    return
            elif not trials:
                return

    def _attempt(self, batch: Batch) -> None:
        trial = batch.trial
        lane = trial, batch.records[0].kind == "artifact"
        try:
            self._deliver(batch)
        except RecordRejected as error:
            # One record of the batch may be at fault, or the run was put into the trash meanwhile:
            # take records one by one and look for the run again, before anything is set aside.
            self._refusals[lane] = self._refusals.get(lane, 0) + 1
            self.search_again()
            if len(batch.records) == 1 and self._refusals[lane] > _MAX_REFUSALS:
                logger.error("the server refuses a record of %s: %s", _describe(trial), error)
                self._outbox.refuse(batch, str(error))
                del self._refusals[lane]
            return
        self._outbox.delivered(batch)
        if self._refusals.pop(lane, None) is not None:
            logger.info("the server takes records of %s again", _describe(trial))

    def _deliver(self, batch: Batch) -> None:
        first, trial = batch.records[0], batch.trial
        match first.kind:
            case "experiment":
                assert self._experiment_id is not None, "connect comes first"
                self._server.set_experiment_tags(self._experiment_id, first.payload)
            case "artifact":
                self._upload(trial, first.payload["staged"], first.payload["folder"])
            case _:
                self._tell(batch)

    def _upload(self, trial: int, staged: str, folder: str) -> None:
        run_id = self._run(trial)
        try:
            path = self._outbox.find_artifact(staged)
        except ValueError as error:
            raise RecordRejected(str(error)) from error
        try:
            self._server.upload(run_id, path, folder)
        except RecordRejected:
            raise
        except Exception as error:
            # An artifact store may raise anything. Should it be the server that does not answer,
            # or that has lost the run, this raises what says so.
            where = self._server.read_run(run_id).artifacts
            name = PurePosixPath(folder, path.name)
            served = where.startswith(("mlflow-artifacts:", "http:", "https:"))
            remedy = (
                "look at the server's log, and how large a file it takes"
                if served
                else "let this machine write there, or have the server serve artifacts"
            )
            reason = (
                f"{name} of {_describe(trial)} cannot be stored at {redact(where)} "
                f"({in_brief(error)}); {remedy}"
            )
            raise NotStored(self._outbox.mark_blocked(reason)) from error

    def _tell(self, batch: Batch) -> None:
        """Write all that a batch has for a run, in one request where it fits."""
        first, last, trial = batch.records[0], batch.records[-1], batch.trial
        known = self._outbox.run_id(trial)
        is_new = trial not in self._open and trial not in self._found
        start = first.payload if first.kind == "start" else {"params": {}, "tags": {}}
        tags = {**start.get("inherited", {}), **start["tags"]}
        run_id = self._run(trial, tags, start.get("time"))
        request = Request(start["params"], [], {})
        points = [
            point
            for record in batch.records
            if record.kind == "metrics"
            for point in record.payload
        ]
        # A run that was only found now may hold what an outbox that is lost had delivered; of a
        # trial whose run was lost, the same may wait twice.
        if batch.uncertain or (run_id != known and not is_new):
            points = self._missing(run_id, points)
        if first.kind == "start" and not is_new:
            request = self._reopen(trial, run_id, first.payload)
        tags = dict(request.tags)
        for record in batch.records:
            if record.kind == "tags":
                tags.update(record.payload)
        if last.kind == "finish":
            tags.update(last.payload["tags"])
        request = Request(request.params, [*request.points, *points], tags)
        self._server.log(run_id, request)
        for point in request.points:
            if (held := self._held.get((run_id, point.key))) is not None:
                held.add(point.step)
        if last.kind == "finish":
            self._server.set_status(run_id, last.payload["status"], last.payload["time"])

    def _reopen(self, trial: int, run_id: str, start: Mapping[str, Any]) -> Request:
        """Let a run go on; returns what it does not hold of its start."""
        state = self._server.read_run(run_id)
        if state.status != "RUNNING":
            self._server.set_status(run_id, "RUNNING", None)
        params: dict[str, str] = start["params"]
        changed = _changed(params, state)
        # The points come before the tags, by which the next attempt tells what has changed.
        points = [] if trial == SWEEP else self._missing(run_id, _changed_points(changed, start))
        told = {clean_key(CHANGED_PREFIX + key): value for key, value in changed.items()}
        missing = {key: value for key, value in params.items() if key not in state.params}
        # A run may have been made before anything told who started its trial.
        inherited = start.get("inherited", {}).items()
        unsaid = {key: value for key, value in inherited if key not in state.tags}
        return Request(missing, points, {**unsaid, **start["tags"], **told})

    def _missing(self, run_id: str, points: list[Point]) -> list[Point]:
        """Return the points that the server does not hold, each (key, step) once."""
        unknown = {point.key for point in points if (run_id, point.key) not in self._held}
        if unknown:
            recorded = self._server.read_run(run_id).keys
            for key in unknown:
                history = self._server.history(run_id, key) if key in recorded else []
                self._held[run_id, key] = {step for step, _ in history}
        missing: dict[tuple[str, int], Point] = {}
        for point in points:
            if point.step not in self._held[run_id, point.key]:
                missing.setdefault((point.key, point.step), point)
        return list(missing.values())

    def _run(
        self, trial: int, tags: Mapping[str, str] | None = None, start_ms: int | None = None
    ) -> str:
        """Return the id of a trial's run: found by its tags, or created."""
        if (run_id := self._open.get(trial)) is not None:
            return run_id
        assert self._experiment_id is not None, "connect comes first"
        found = self._found.get(trial)
        if found is None:
            own = self._identity(trial)
            start_ms = int(time.time() * 1000) if start_ms is None else start_ms
            self._outbox.create_started()
            run_id = self._server.create_run(
                self._experiment_id, start_ms, {**(tags or {}), **own}
            )
            self._outbox.set_run_id(trial, run_id, held=None)
        else:
            run_id = found.run_id
            if found.deleted:
                self._server.restore_run(run_id)
            if self._outbox.run_id(trial) != run_id:
                self._outbox.set_run_id(trial, run_id, held=self._read_marks(run_id))
        self._open[trial] = run_id
        return run_id

    def _identity(self, trial: int) -> dict[str, str]:
        if trial == SWEEP:
            return {TAG_SWEEP: self._sweep_id, TAG_ROLE: "sweep", TAG_NAME: self._name}
        return {
            TAG_SWEEP: self._sweep_id,
            TAG_ROLE: "trial",
            TAG_TRIAL: str(trial),
            TAG_NAME: f"trial-{trial:04d}",
            TAG_PARENT: self._run(SWEEP),
        }

    def _read_marks(self, run_id: str) -> HighWaterMarks:
        """Rebuild from the server what an outbox that was lost had known."""
        marks = HighWaterMarks()
        for key in self._server.read_run(run_id).keys:
            history = self._server.history(run_id, key)
            marks.steps[key] = max(step for step, _ in history)
            if key.startswith(INFINITE_PREFIX):
                marks.num_infinite[key] = int(max(value for _, value in history))
        return marks

    def _choose(self, runs: list[FoundRun], known: Mapping[int, str]) -> dict[int, FoundRun]:
        """Return one run per trial: the one this outbox knows, else a living one, else the oldest.

        A create whose answer was lost and that reached the server late may have left an empty
        twin; it is deleted.
        """
        chosen: dict[int, FoundRun] = {}
        runs = sorted(
            runs,
            key=lambda r: (
                known.get(r.trial) != r.run_id,
                r.deleted,
                r.empty,
                r.start_ms,
                r.run_id,
            ),
        )
        for run in runs:
            if run.trial not in chosen:
                chosen[run.trial] = run
            elif run.empty and not run.deleted:
                self._server.delete_run(run.run_id)
        return chosen


def in_brief(error: Exception) -> str:
    """What went wrong at a server, in one line without secrets."""
    text = redact(str(error)).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {text}"


def _changed(params: Mapping[str, str], state: RunState) -> dict[str, str]:
    """Return the parameters that are not what was recorded last, as they are now."""
    changed = {}
    for key, value in params.items():
        first, now = (clip_text(v, MAX_TAG_VALUE) for v in (state.params.get(key, value), value))
        if state.tags.get(clean_key(CHANGED_PREFIX + key), first) != now:
            changed[key] = now
    return changed


def _changed_points(changed: Mapping[str, str], payload: Mapping[str, Any]) -> list[Point]:
    """Return the changed parameters that are numbers, as points at the step of the change."""
    return [
        Point(clean_key(PARAM_PREFIX + key), number, payload["step"], payload["time"])
        for key, value in changed.items()
        if (number := as_number(value)) is not None
    ]


def _describe(trial: int) -> str:
    return "the sweep" if trial == SWEEP else f"trial {trial}"


__all__ = ["Delivery", "FoundRun", "RecordRejected", "RunGone", "RunState", "TrackingServer"]
