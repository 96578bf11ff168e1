"""Deliver an outbox to a tracking server, so that each (run, key, step) arrives exactly once.

After any error the outcome of the request counts as unknown. The next attempt searches the runs
again by their tags, and compares the metrics that were in flight with what the server holds. What
must not live here: MLflow (see `tracking.mlflow_server`), threads and waiting (see
`tracking.delivery_loop`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from redaction.secrets import redact
from tracking.limits import MAX_TAG_VALUE, clean_key, clip_text
from tracking.metric_points import INFINITE_PREFIX, HighWaterMarks, Point, Request
from tracking.outbox import SWEEP, TAG_REPEATS, Batch, Outbox, Record, logger

TAG_SWEEP = "gradsweep.sweep_id"
TAG_TRIAL = "gradsweep.trial"
TAG_ROLE = "gradsweep.role"
TAG_PARENT = "mlflow.parentRunId"
TAG_NAME = "mlflow.runName"
TAG_REPLACED = "gradsweep.replaced_trial"
"""A tag of a deleted run: the number of the trial that another run records now."""

CHANGED_PREFIX = "param_changed."
PARAM_PREFIX = "param/"

_MAX_REFUSALS = 2
_TRIALS_PER_SYNC = 16
"""How many trials' metrics are marked with one fsync. A higher number needs fewer fsyncs. But it
blocks appends for longer, and more points must be compared with the server after a kill."""


class RecordRejected(Exception):
    """The server understood a request and rejects its content for good."""


class RunGone(Exception):
    """The server does not have the run."""


class NotStored(Exception):
    """The server answers but cannot store an artifact; other records can be delivered."""


@dataclass(frozen=True)
class FoundRun:
    """A run of this sweep as a search returns it."""

    run_id: str
    trial: int
    """The trial's number, or `SWEEP`."""
    start_ms: int
    deleted: bool = False
    """The run is in the server's trash and can be restored."""
    empty: bool = False
    """It has neither parameters nor metrics."""


@dataclass(frozen=True)
class RunState:
    """What a server holds for one run."""

    status: str
    params: dict[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    """The metrics with at least one value."""
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: str = ""
    """The URI of its artifacts."""


class TrackingServer(Protocol):
    """The calls of a tracking server that `Delivery` uses.

    Any method may raise any exception. After one other than `RecordRejected` or `RunGone`, the
    outcome of the call is unknown.
    """

    def open_experiment(self, known: str | None) -> str:
        """Find, restore or create the experiment; returns its id.

        Args:
            known: The id of the experiment used before, which may have been renamed since, or
                belong to another server.
        """
        ...

    def find_runs(self, experiment_id: str) -> list[FoundRun]:
        """All runs of the sweep, deleted ones included."""
        ...

    def create_run(self, experiment_id: str, start_ms: int, tags: Mapping[str, str]) -> str:
        """Create a run; returns its id."""
        ...

    def restore_run(self, run_id: str) -> None:
        """Restore a deleted run."""
        ...

    def delete_run(self, run_id: str) -> None:
        """Delete a run; it can be restored."""
        ...

    def read_run(self, run_id: str) -> RunState:
        """Read a run's status, parameters, metric names, tags and artifact URI."""
        ...

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """All values of one metric, as (step, value)."""
        ...

    def log(self, run_id: str, request: Request) -> None:
        """Write new parameters, then points, then tags.

        If the call fails, the server may hold only the first of these.
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
    """Delivers the records of an outbox to a server. Used by one thread."""

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
        self._known_steps: dict[tuple[str, str], set[int]] = {}
        self._refusals: dict[tuple[int, bool], int] = {}
        """How often a record was rejected, by trial and whether the record is an artifact."""
        self._uploaded = SWEEP - 1
        """The trial whose artifact was sent last."""

    def connect(self) -> None:
        """Find the experiment and all runs of the sweep, unless this is done already."""
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
        """Drop all knowledge of the server's state."""
        self._experiment_id = None
        self._open.clear()
        self._known_steps.clear()

    def search_again(self) -> None:
        """Search all runs again: a create request without an answer may have worked."""
        self.disconnect()
        self.connect()

    def drain(self, stop: Callable[[], bool], *, uploads: bool = True) -> None:
        """Deliver until the outbox is empty or `stop` returns True.

        Each round sends one batch of each trial, then one artifact.
        """
        while True:
            trials, any_sent = self._outbox.trials(), False
            for first in range(0, len(trials), _TRIALS_PER_SYNC):
                some = trials[first : first + _TRIALS_PER_SYNC]
                self._outbox.prepare(each for each in some if (each, False) not in self._refusals)
                for trial in some:
                    if stop():
                        return
                    single = (trial, False) in self._refusals
                    if (batch := self._outbox.next_batch(trial, single=single)) is not None:
                        self._attempt(batch)
                        any_sent = True
            artifact = self._outbox.claim_artifact(self._uploaded) if uploads else None
            if artifact is not None:
                self._uploaded = artifact.trial
                self._attempt(artifact)
                if stop():
                    return
            elif not any_sent:
                return

    def _attempt(self, batch: Batch) -> None:
        trial = batch.trial
        key = trial, batch.kind == "artifact"
        try:
            self._deliver(batch)
        except RecordRejected as error:
            # One record of the batch may be invalid, or the run may have been deleted. So search
            # the run again and send records one by one before one of them is refused.
            self._refusals[key] = self._refusals.get(key, 0) + 1
            self.search_again()
            if batch.is_single and self._refusals[key] > _MAX_REFUSALS:
                logger.error("the server refuses a record of %s: %s", _describe(trial), error)
                self._outbox.refuse(batch, str(error))
                del self._refusals[key]
            return
        self._outbox.delivered(batch)
        if self._refusals.pop(key, None) is not None:
            logger.info("the server takes records of %s again", _describe(trial))

    def _deliver(self, batch: Batch) -> None:
        trial, records = batch.trial, batch.records
        match batch.kind:
            case "experiment":
                assert self._experiment_id is not None, "connect comes first"
                self._server.set_experiment_tags(self._experiment_id, records[0].payload)
            case "artifact":
                payload = records[0].payload
                self._upload(trial, payload["staged"], payload["folder"])
            case "replace":
                self._remove_replaced(trial, records[0])
            case _:
                self._write_run(batch)

    def _remove_replaced(self, trial: int, record: Record) -> None:
        """Delete a trial's run, so that the next record creates a new one.

        Its tags no longer name the trial: a deleted run that does is found and restored. The run's
        id is stored before that, so that an interrupted removal is completed.
        """
        assert self._experiment_id is not None, "connect comes first"
        runs = [run for run in self._server.find_runs(self._experiment_id) if run.trial == trial]
        known = list(dict.fromkeys([*record.payload["run_ids"], *(run.run_id for run in runs)]))
        self._outbox.note_replaced(record, known)
        for run in runs:
            if run.deleted:
                self._server.restore_run(run.run_id)
            self._server.set_status(run.run_id, "FAILED", int(time.time() * 1000))
            self._server.log(run.run_id, Request({}, [], _replaced_identity(trial)))
        for run_id in known:
            with suppress(RunGone):
                self._server.delete_run(run_id)
        self._open.pop(trial, None)
        self._found.pop(trial, None)

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
            # An artifact store may raise any exception. This request to the server raises an
            # error of its own if the server is down or has lost the run.
            where = self._server.read_run(run_id).artifacts
            name = PurePosixPath(folder, path.name)
            served = where.startswith(("mlflow-artifacts:", "http:", "https:"))
            remedy = (
                "read the server's log, and check its limit for the size of a file"
                if served
                else "give this machine write access there, or let the server serve artifacts"
            )
            reason = (
                f"{name} of {_describe(trial)} cannot be stored at {redact(where)} "
                f"({error_line(error)}); {remedy}"
            )
            raise NotStored(self._outbox.mark_blocked(reason)) from error

    def _write_run(self, batch: Batch) -> None:
        """Write a batch to its run, in one request if it fits."""
        trial, points = batch.trial, batch.points
        known = self._outbox.run_id(trial)
        is_new = trial not in self._open and trial not in self._found
        by_kind = {record.kind: record.payload for record in batch.records}
        start = by_kind.get("start", {"params": {}, "tags": {}})
        finish = by_kind.get("finish")
        tags = {**start.get("inherited", {}), **start["tags"]}
        run_id = self._run(trial, tags, start.get("time"))
        request = Request(start["params"], [], {})
        # A run that was found by search may hold points that a lost outbox had delivered.
        if batch.uncertain or (run_id != known and not is_new):
            points = self._missing(run_id, points)
        if "start" in by_kind and not is_new:
            request = self._reopen(trial, run_id, start)
        tags = dict(request.tags)
        for record in batch.records:
            if record.kind == "tags":
                tags.update(record.payload)
        tags.update({} if finish is None else finish["tags"])
        request = Request(request.params, [*request.points, *points], tags)
        self._server.log(run_id, request)
        for point in request.points:
            if (held := self._known_steps.get((run_id, point.key))) is not None:
                held.add(point.step)
        if finish is not None:
            self._server.set_status(run_id, finish["status"], finish["time"])

    def _reopen(self, trial: int, run_id: str, start: Mapping[str, Any]) -> Request:
        """Set a run to RUNNING; returns the part of its start record that it lacks."""
        state = self._server.read_run(run_id)
        if state.status != "RUNNING":
            self._server.set_status(run_id, "RUNNING", None)
        params: dict[str, str] = start["params"]
        changed = _changed(params, state)
        # Points are sent before tags: once the tags are written, the next attempt finds no change.
        points = [] if trial == SWEEP else self._missing(run_id, _changed_points(changed, start))
        now = {clean_key(CHANGED_PREFIX + key): value for key, value in changed.items()}
        missing = {key: value for key, value in params.items() if key not in state.params}
        # The driver that created the run may not have had these tags.
        inherited = start.get("inherited", {}).items()
        missing_tags = {key: value for key, value in inherited if key not in state.tags}
        return Request(missing, points, {**missing_tags, **start["tags"], **now})

    def _missing(self, run_id: str, points: list[Point]) -> list[Point]:
        """Return the points that the server does not hold, each (key, step) once."""
        unknown = {point.key for point in points if (run_id, point.key) not in self._known_steps}
        if unknown:
            recorded = self._server.read_run(run_id).keys
            for key in unknown:
                history = self._server.history(run_id, key) if key in recorded else []
                self._known_steps[run_id, key] = {step for step, _ in history}
        missing: dict[tuple[str, int], Point] = {}
        for point in points:
            if point.step not in self._known_steps[run_id, point.key]:
                missing.setdefault((point.key, point.step), point)
        return list(missing.values())

    def _run(
        self, trial: int, tags: Mapping[str, str] | None = None, start_ms: int | None = None
    ) -> str:
        """Return the id of a trial's run; find the run by its tags, or create it."""
        if (run_id := self._open.get(trial)) is not None:
            return run_id
        assert self._experiment_id is not None, "connect comes first"
        found = self._found.get(trial)
        if found is None:
            above = (tags or {}).get(TAG_REPEATS, "")
            parent = self._run(int(above) if above.isdecimal() else SWEEP) if trial >= 0 else None
            own = self._identity(trial, parent)
            start_ms = int(time.time() * 1000) if start_ms is None else start_ms
            self._outbox.create_started()
            run_id = self._server.create_run(
                self._experiment_id, start_ms, {**(tags or {}), **own}
            )
            self._outbox.set_run_id(trial, run_id, recorded=None)
        else:
            run_id = found.run_id
            if found.deleted:
                self._server.restore_run(run_id)
            if self._outbox.run_id(trial) != run_id:
                self._outbox.set_run_id(trial, run_id, recorded=self._read_marks(run_id))
        self._open[trial] = run_id
        return run_id

    def _identity(self, trial: int, parent: str | None) -> dict[str, str]:
        if parent is None:
            return {TAG_SWEEP: self._sweep_id, TAG_ROLE: "sweep", TAG_NAME: self._name}
        return {
            TAG_SWEEP: self._sweep_id,
            TAG_ROLE: "trial",
            TAG_TRIAL: str(trial),
            TAG_NAME: f"trial-{trial:04d}",
            TAG_PARENT: parent,
        }

    def _read_marks(self, run_id: str) -> HighWaterMarks:
        """Rebuild the marks of a lost outbox from the server's history."""
        marks = HighWaterMarks()
        for key in self._server.read_run(run_id).keys:
            history = self._server.history(run_id, key)
            marks.steps[key] = max(step for step, _ in history)
            if key.startswith(INFINITE_PREFIX):
                marks.num_infinite[key] = int(max(value for _, value in history))
        return marks

    def _choose(self, runs: list[FoundRun], known: Mapping[int, str]) -> dict[int, FoundRun]:
        """Return one run per trial: the outbox's own, else one not deleted, else the oldest.

        A create request whose answer was lost may have left a second, empty run. It is deleted.
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


def as_number(text: str) -> float | None:
    """Parse a parameter's text as a finite number; None if it is not one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def error_line(error: Exception) -> str:
    """An error of a server as one line without secrets."""
    text = redact(str(error)).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {text}"


def _replaced_identity(trial: int) -> dict[str, str]:
    return {
        TAG_REPLACED: str(trial),
        TAG_NAME: f"trial-{trial:04d} (replaced)",
        TAG_ROLE: "replaced",
        TAG_TRIAL: "",
    }


def _changed(params: Mapping[str, str], state: RunState) -> dict[str, str]:
    """Return the parameters whose values differ from those recorded last, with the new values."""
    changed = {}
    for key, value in params.items():
        first, now = (clip_text(v, MAX_TAG_VALUE) for v in (state.params.get(key, value), value))
        if state.tags.get(clean_key(CHANGED_PREFIX + key), first) != now:
            changed[key] = now
    return changed


def _changed_points(changed: Mapping[str, str], payload: Mapping[str, Any]) -> list[Point]:
    """Return the changed parameters that are numbers as points, at the step of the change."""
    return [
        Point(clean_key(PARAM_PREFIX + key), number, payload["step"], payload["time"])
        for key, value in changed.items()
        if (number := as_number(value)) is not None
    ]


def _describe(trial: int) -> str:
    return "the sweep" if trial == SWEEP else f"trial {trial}"


__all__ = ["Delivery", "FoundRun", "RecordRejected", "RunGone", "RunState", "TrackingServer"]
