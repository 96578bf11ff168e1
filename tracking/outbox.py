"""What a sweep's runs have not received: a queue of records, and a cursor into each trial's log.

An append commits without an fsync: it survives the death of the process. The rows of a trial are
durable once, in its own files (`unsent_rows`). The outbox has up to which step they are to be
delivered, and marks of what the server has. Before metrics are sent, they are marked in flight and
the mark is synced, with one fsync for many trials. So after any crash, a power failure included,
the outbox knows which points may already be at the server. What must not live here: anything about
servers; see `tracking.delivery`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tracking.limits import MAX_POINTS
from tracking.metric_points import HighWaterMarks, MetricRow, Point, PointRow
from tracking.outbox_file import (
    Marks,
    OutboxError,
    OutboxFile,
    Staging,
    delete_meta,
    outbox_error,
    read_marks,
    read_meta,
    save_marks,
    set_meta,
)
from tracking.unsent_rows import LogPart, Target, TrialLog

logger = logging.getLogger("tracking")

Kind = Literal["start", "metrics", "tags", "experiment", "artifact", "finish", "replace"]


@dataclass(frozen=True)
class Record:
    """One queued call. Its payload is parsed JSON."""

    id: int
    kind: Kind
    payload: Any


@dataclass(frozen=True)
class Batch:
    """What is delivered of one trial together: records in their order, and points of its log.

    A batch is one artifact, or the experiment's tags, or the replacement of a run, or one request
    to a run: an optional start, metrics and tags, an optional finish. Records queued after an
    artifact may be delivered before it, and rows of the log before the finish of an earlier
    attempt.
    """

    trial: int
    records: list[Record]
    points: list[Point] = field(default_factory=list)
    marks: HighWaterMarks = field(default_factory=HighWaterMarks)
    """The trial's marks once the points are delivered."""
    uncertain: bool = False
    """The outcome of an earlier attempt is unknown: the server may already have some points."""
    part: LogPart | None = None
    """The part of the log that the points have."""
    reached: Target | None = None
    """The target that the log reaches with this part; None: it does not reach it."""
    corrections: str | None = None
    """See `_CORRECTIONS`: how many there had been when the marks were read."""

    @property
    def kind(self) -> Kind:
        """The kind of the first record; `metrics` if there is only a part of the log."""
        return self.records[0].kind if self.records else "metrics"

    @property
    def is_single(self) -> bool:
        """Whether the batch has no smaller parts."""
        return len(self.records) == (0 if self.part and self.part.points else 1)


def coalesce(records: Iterable[Record]) -> list[Record]:
    """Return the oldest of a trial's records that fit into one batch."""
    taken: list[Record] = []
    for record in records:
        if taken and not (
            taken[-1].kind in ("start", "metrics", "tags")
            and record.kind in ("metrics", "tags", "finish")
        ):
            break
        taken.append(record)
    return taken


SWEEP = -1
"""Stands for the sweep's own run where a trial's number is expected."""

TAG_REPEATS = "gradsweep.repeats"
"""A tag of a trial's run at its start: the number of the trial below whose run it is shown."""

LOST = "LOST"
"""Stands for the last status of a run that the server no longer has."""

_MAX_RECORDS = 256
_SINGLE_POINTS = MAX_POINTS // 10
"""How many points of a log are set aside together if the server rejects one of them."""
_LATE_SECONDS = 10.0
"""How long a log may lack a reported row: a worker elsewhere may write it only when it ends."""
_STORE = "store"
_CORRECTIONS = "corrections"
"""Key of the number of corrections to marks: what was read by earlier marks is not kept."""

_UNACKED_CREATES = "unanswered"
"""Key of the number of requests to create a run whose outcome is unknown."""

_BLOCKED = "held"
"""Key of the reason why artifacts could not be stored."""

_NEEDS_FIGURES = "lacks_pictures"
"""Key that is set while the figures must be sent again, to a new store or a new run."""


class Outbox(OutboxFile):
    """The queue in one directory. Its methods may be called from any thread.

    Several processes may have it open; each sees what the others have written.
    """

    def __init__(self, directory: Path, *, delivers: bool = False) -> None:
        self._staging = Staging(directory)
        self._logs: dict[int, TrialLog] = {}
        self._prepared: dict[int, Batch] = {}
        self._late: dict[int, float] = {}
        """Since when a trial's log has lacked rows that the trial has reported."""
        self._corrections: str | None = None
        self._left = 0
        super().__init__(directory)
        if not delivers:  # else this would remove a copy whose record is not yet committed
            query = "SELECT payload FROM records WHERE kind = 'artifact'"
            self._staging.keep_only(json.loads(text) for (text,) in self._db.execute(query))
            # The marks of a trial whose run was lost cover only what was sent since.
            lost = self._db.execute("SELECT trial FROM told WHERE status = ?", (LOST,)).fetchall()
            self.reset_trials({trial: True for (trial,) in lost})
            if self.moved_aside is not None:  # its queued figures are lost
                with self._lock, self._transaction() as db:
                    set_meta(db, _NEEDS_FIGURES, "yes")

    # -- called by the recorder -------------------------------------------------------------------

    def append(self, trial: int, kind: Kind, payload: Mapping[str, Any]) -> None:
        """Queue one record."""
        text = json.dumps(payload)
        with self._lock, self._transaction() as db:
            _insert(db, trial, kind, text)
            if kind in ("start", "finish"):
                status = "RUNNING" if kind == "start" else payload.get("told", payload["status"])
                db.execute(
                    "INSERT INTO told VALUES (?, ?) ON CONFLICT (trial) "
                    "DO UPDATE SET status = excluded.status WHERE status != ?",
                    (trial, status, LOST),
                )

    def append_rows(self, trial: int, rows: Iterable[MetricRow]) -> None:
        """Queue a few rows that are not in the trial's log."""
        found = [
            (int(row.step), int(row.timestamp_ms), {k: float(v) for k, v in row.metrics.items()})
            for row in rows
        ]
        if found:
            self.append(trial, "metrics", {"rows": found})

    def follow(self, trial: int, target: Target) -> None:
        """Deliver the trial's log up to a target from now on."""
        with self._lock, self._transaction() as db:
            if _read_target(db, trial) != target:
                db.execute("INSERT OR REPLACE INTO logs VALUES (?, ?, ?, ?, 1)", (trial, *target))

    def limit_log(self, trial: int, step: int) -> None:
        """Deliver no row of a trial's log after a step, until it is followed further."""
        with self._lock, self._transaction() as db:
            db.execute("UPDATE logs SET step = ?, ended = 0 WHERE trial = ?", (step, trial))

    def append_artifact(self, trial: int, path: Path, name: str) -> None:
        """Copy a file and queue the copy. The copy is synced to the disk before its record."""
        payload = self._staging.copy(path, name)
        try:
            self.append(trial, "artifact", payload)
        except BaseException:  # Ctrl-C must leave no copy behind, too; the error is raised again
            self._staging.remove(payload)
            raise

    def find_artifact(self, staged: str) -> Path:
        """Return a copy's path; see `Staging.find`."""
        return self._staging.find(staged)

    def last_step(self, trial: int) -> int:
        """The highest step that is to be delivered of a trial; 0 if there is none."""
        with self._lock:
            target = _read_target(self._db, trial)
            steps = queued_marks(self._db, trial).steps.values()
            return max([0 if target is None else target.step, *steps])

    @property
    def pending(self) -> int:
        """How many records wait; after `close`, how many waited at that moment."""
        with self._lock:
            return self._left if self._closed else self._count()

    # -- called by the delivery -------------------------------------------------------------------

    def trials(self) -> list[int]:
        """The trials with anything to deliver but artifacts, the sweep's own run first."""
        with self._lock:
            return waiting_trials(self._db)

    def prepare(self, trials: Iterable[int], *, single: bool = False) -> None:
        """Mark the next metrics of each trial as in flight, with one fsync for all trials."""
        prepared: dict[int, Batch] = {}
        with self._lock:
            for trial in trials:
                if trial in self._prepared and not single:
                    continue
                if (batch := self._read_batch(trial, single=single)) is not None:
                    prepared[trial] = batch
            sent_next = [batch for batch in prepared.values() if batch.points]
            if sent_next:  # a transaction blocks appends: keep it short
                with self._transaction() as db:
                    for batch in sent_next:
                        marks = read_marks(db, batch.trial)
                        in_flight = batch.marks.copy()
                        if marks.in_flight is not None:
                            in_flight.merge_max(marks.in_flight)
                        save_marks(db, batch.trial, Marks(marks.delivered, in_flight))
        if sent_next:
            self._sync()
        self._prepared.update(prepared)

    def next_batch(self, trial: int, *, single: bool = False) -> Batch | None:
        """Return what is delivered next of a trial, about 1,000 points at most; no artifact."""
        self.prepare([trial], single=single)
        batch = self._prepared.pop(trial, None)
        with self._lock:
            if batch is None or batch.corrections == read_meta(self._db, _CORRECTIONS):
                return batch
        return self.next_batch(trial, single=single)  # another process has reset the trial

    def claim_artifact(self, after: int) -> Batch | None:
        """Return an artifact that is the first waiting record of its trial, if there is one."""
        with self._lock:
            query = (
                "SELECT id, trial, payload FROM records AS own WHERE kind = 'artifact' "
                "AND trial > ? AND NOT EXISTS "
                "(SELECT 1 FROM records WHERE trial = own.trial AND id < own.id) "
                "ORDER BY trial LIMIT 1"
            )
            row = (
                self._db.execute(query, (after,)).fetchone()
                or self._db.execute(query, (SWEEP - 1,)).fetchone()
            )
        if row is None:
            return None
        id_, trial, payload = row
        return Batch(trial, [Record(id_, "artifact", json.loads(payload))])

    def mark_blocked(self, reason: str) -> str | None:
        """Store why artifacts are blocked, until one is delivered; return a message about it."""
        with self._lock, self._transaction() as db:
            set_meta(db, _BLOCKED, reason)
            return describe_blocked(db)

    def delivered(self, batch: Batch) -> None:
        """Remove records that the server acknowledged, and raise the trial's marks."""
        with self._lock, self._transaction() as db:
            db.executemany(
                "DELETE FROM records WHERE id = ?", [(record.id,) for record in batch.records]
            )
            self._raise_marks(db, batch)
            if batch.kind == "experiment":
                set_meta(db, "experiment_tags", json.dumps(list(batch.records[0].payload)))
            if batch.kind == "artifact":
                delete_meta(db, _BLOCKED)
            if batch.kind == "replace":  # another process may just have found the run
                db.execute("DELETE FROM runs WHERE trial = ?", (batch.trial,))
        for record in batch.records:
            if record.kind == "artifact":
                self._staging.remove(record.payload)

    def refuse(self, batch: Batch, reason: str) -> None:
        """Move what the server rejects for good into `refused`, and deliver what follows."""
        with self._lock, self._transaction() as db:
            for record in batch.records:
                db.execute(
                    "INSERT INTO refused (trial, kind, payload, reason) "
                    "SELECT trial, kind, payload, ? FROM records WHERE id = ?",
                    (reason, record.id),
                )
                db.execute("DELETE FROM records WHERE id = ?", (record.id,))
            if not batch.records:
                db.execute(
                    "INSERT INTO refused (trial, kind, payload, reason) VALUES (?, ?, ?, ?)",
                    (batch.trial, "metrics", json.dumps(batch.points), reason),
                )
            self._raise_marks(db, batch)
            if batch.kind == "artifact":
                delete_meta(db, _BLOCKED)

    def run_id(self, trial: int) -> str | None:
        """The id of the trial's run, or None while it is unknown."""
        with self._lock:
            row = self._db.execute("SELECT run_id FROM runs WHERE trial = ?", (trial,)).fetchone()
        return row[0] if row else None

    def runs(self) -> dict[int, str]:
        """Run ids by trial, the sweep's own run under `SWEEP`."""
        with self._lock:
            return dict(self._db.execute("SELECT trial, run_id FROM runs"))

    def create_started(self) -> None:
        """Count a request to create a run, before it is sent; `set_run_id` counts its answer."""
        with self._lock, self._transaction() as db:
            set_meta(db, _UNACKED_CREATES, str(_count_unacked_creates(db) + 1))

    @property
    def num_unacked_creates(self) -> int:
        """How many requests to create a run have no answer: each may still reach the server."""
        with self._lock:
            return _count_unacked_creates(self._db)

    def creates_settled(self) -> None:
        """Note that no earlier request to create a run can still reach the server."""
        with self._lock, self._transaction() as db:
            set_meta(db, _UNACKED_CREATES, "0")

    def set_run_id(self, trial: int, run_id: str, recorded: HighWaterMarks | None) -> None:
        """Store a trial's run id, and what a run that was found holds."""
        with self._lock, self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (trial, run_id))
            if recorded is None:
                set_meta(db, _UNACKED_CREATES, str(max(_count_unacked_creates(db) - 1, 0)))
                return
            marks = read_marks(db, trial)
            marks.delivered.merge_max(recorded)
            # Another process may have sent more: the next points are compared first.
            save_marks(db, trial, Marks(marks.delivered, marks.in_flight or recorded))

    def replace_run(self, trial: int) -> None:
        """Record a trial in a new run, from its beginning; the run that it had is removed.

        What waits for the old run is dropped. A second call before the new run exists changes
        nothing at the server.
        """
        with self._lock, self._transaction() as db:
            found = db.execute("SELECT run_id FROM runs WHERE trial = ?", (trial,)).fetchone()
            # First, as SQLite gives the ids of deleted records again, and another process may be
            # delivering these records now.
            _insert(db, trial, "replace", json.dumps({"run_ids": list(found or ())}))
            db.execute("DELETE FROM records WHERE trial = ? AND kind != 'replace'", (trial,))
            for table in ("runs", "told", "logs"):
                db.execute(f"DELETE FROM {table} WHERE trial = ?", (trial,))
            self._correct_marks(db, trial, HighWaterMarks())

    def note_replaced(self, record: Record, run_ids: Iterable[str]) -> None:
        """Store which runs a replacement removes, before their tags name no trial any more."""
        text = json.dumps({"run_ids": list(run_ids)})
        with self._lock, self._transaction() as db:
            db.execute("UPDATE records SET payload = ? WHERE id = ?", (text, record.id))

    def reset_run(self, trial: int) -> None:
        """Delete the id of a run that the server no longer has, so that it can be recorded again.

        Its log is delivered again from the beginning. From now on each point of the trial is
        compared with the server before it is sent. The current recorder continues where it is; the
        next process that opens the outbox records the run's parameters and tags again, too.
        """
        with self._lock, self._transaction() as db:
            db.execute("DELETE FROM runs WHERE trial = ?", (trial,))
            db.execute("UPDATE logs SET waits = 1 WHERE trial = ?", (trial,))
            db.execute("INSERT OR REPLACE INTO told VALUES (?, ?)", (trial, LOST))
            self._correct_marks(db, trial, HighWaterMarks(are_complete=False))

    def set_target(self, store: str, *, gone: bool) -> None:
        """Deliver to this store from now on.

        If it is a new store, or one that has lost its runs, the outbox deletes what it knows of
        the store. The next recorder then sends everything, and each point is compared first.
        """
        with self._lock, self._transaction() as db:
            before = read_meta(db, _STORE) or store
            set_meta(db, _STORE, store)
            delivered = db.execute("SELECT 1 FROM runs").fetchone() is not None
            if not delivered or (before == store and not gone):
                return
            set_meta(db, _NEEDS_FIGURES, "yes")
            for table in ("runs", "told", "marks", "logs"):
                db.execute(f"DELETE FROM {table}")
            delete_meta(db, "experiment_id", "experiment_tags", _BLOCKED)
            # These are sent again from the ledger, and metrics from the trials' own files.
            db.execute("DELETE FROM records WHERE kind IN ('start', 'metrics', 'finish')")
            _count_correction(db)

    def reset_trials(self, trials: Mapping[int, bool]) -> None:
        """Record some trials again from their beginning, because the store lost part of them.

        Each point is compared with the store before it is sent, so that none is written twice.
        """
        for trial, is_gone in trials.items():
            with self._lock, self._transaction() as db:
                if is_gone:
                    set_meta(db, _NEEDS_FIGURES, "yes")
                    db.execute("DELETE FROM runs WHERE trial = ?", (trial,))
                for table in ("told", "logs"):
                    db.execute(f"DELETE FROM {table} WHERE trial = ?", (trial,))
                self._correct_marks(db, trial, HighWaterMarks(are_complete=False))

    @property
    def needs_figures(self) -> bool:
        """Whether the figures were sent to another store, or to a run that is lost."""
        with self._lock:
            return read_meta(self._db, _NEEDS_FIGURES) is not None

    def figures_sent(self) -> None:
        """Note that the figures of all trials were queued again."""
        with self._lock, self._transaction() as db:
            delete_meta(db, _NEEDS_FIGURES)

    @property
    def experiment_id(self) -> str | None:
        """The id of the experiment that was found last; None if none was."""
        with self._lock:
            return read_meta(self._db, "experiment_id")

    def found(self, experiment_id: str) -> None:
        """Store the experiment's id."""
        with self._lock, self._transaction() as db:
            set_meta(db, "experiment_id", experiment_id)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OutboxError):
                    self._left = self._count()
                self._close_file()

    # -- private ----------------------------------------------------------------------------------

    def _count(self) -> int:
        try:
            return count_waiting(self._db)
        except sqlite3.Error as error:
            raise outbox_error(self._path, error) from error

    def _read_batch(self, trial: int, *, single: bool) -> Batch | None:
        """Read what is delivered next; with `single`, the smallest part that can be refused."""
        if (corrections := read_meta(self._db, _CORRECTIONS)) != self._corrections:
            self._corrections = corrections
            self._logs.clear()
        records = self._read_records(trial, 1 if single else _MAX_RECORDS)
        own, points = read_marks(self._db, trial), []
        marks = own.delivered.copy()
        for record in records:
            if record.kind == "metrics":
                points += marks.filter_new(payload_rows(record.payload))
        part = reached = None
        target = _read_target(self._db, trial, waiting=True)
        first = records[0].kind if records else "finish"
        if target and (first == "finish" if single else first not in ("experiment", "replace")):
            log = self._logs.setdefault(trial, TrialLog(self.directory, trial))
            limit = _SINGLE_POINTS if single else MAX_POINTS - len(points)
            part = log.read(target, marks, limit)
            points += part.points
            is_early = not part.is_last or (single and bool(part.points))
            if is_early and records and records[-1].kind == "finish":
                records.pop()
            reached = target if self._is_reached(target, log, part, marks) else None
            if reached and not (records or points):
                with self._transaction() as db:
                    _set_read(db, trial, reached)
        if not (records or points):
            return None
        return Batch(trial, records, points, marks, own.is_uncertain, part, reached, corrections)

    def _read_records(self, trial: int, limit: int) -> list[Record]:
        query = (
            "SELECT id, kind, payload FROM records "
            "WHERE trial = ? AND kind != 'artifact' ORDER BY id LIMIT ?"
        )
        rows = self._db.execute(query, (trial, limit)).fetchall()
        return coalesce(Record(id_, kind, json.loads(text)) for id_, kind, text in rows)

    def _is_reached(
        self, target: Target, log: TrialLog, part: LogPart, marks: HighWaterMarks
    ) -> bool:
        """Return whether a log needs not be read on until its target changes."""
        if not part.is_last:
            return False
        sent = max(marks.steps.values(), default=0)
        if part.fault is None and max(part.step, sent) >= target.step:
            self._late.pop(log.trial, None)
            return True
        since = self._late.setdefault(log.trial, time.monotonic())
        is_gone = not log.directory.is_dir()
        if not is_gone and time.monotonic() < since + _LATE_SECONDS:
            return False
        del self._late[log.trial]
        logger.warning(
            "trial %d has reported step %d, and its metrics after step %d are not sent: %s; no "
            "other file has them; restore it from a backup, then run sync --verify",
            log.trial,
            target.step,
            part.step,
            part.fault or f"{log.curve} {'is gone' if is_gone else 'ends there'}",
        )
        return True

    def _raise_marks(self, db: sqlite3.Connection, batch: Batch) -> None:
        """Store what the server has received, unless the trial was reset meanwhile."""
        if read_meta(db, _CORRECTIONS) != batch.corrections:
            return
        if batch.points:
            delivered, in_flight = read_marks(db, batch.trial)
            delivered.merge_max(batch.marks)
            if in_flight is not None and delivered.covers(in_flight):
                in_flight = None
            save_marks(db, batch.trial, Marks(delivered, in_flight))
        if batch.reached is not None:
            _set_read(db, batch.trial, batch.reached)
        if batch.part is not None and batch.trial in self._logs:
            self._logs[batch.trial].delivered(batch.part)

    def _correct_marks(self, db: sqlite3.Connection, trial: int, marks: HighWaterMarks) -> None:
        """Replace a trial's marks; what any process has read by the earlier ones is dropped."""
        save_marks(db, trial, Marks(marks))
        _count_correction(db)
        self._prepared.pop(trial, None)


def payload_rows(payload: Mapping[str, Any]) -> list[PointRow]:
    """Return the rows of a record of metrics."""
    return [PointRow(*row) for row in payload["rows"]]


def queued_marks(db: sqlite3.Connection, trial: int) -> HighWaterMarks:
    """Return how far a trial's metrics were delivered, or may have been, or are queued."""
    marks, in_flight = read_marks(db, trial)
    if in_flight is not None:
        marks.merge_max(in_flight)
    query = "SELECT payload FROM records WHERE trial = ? AND kind = 'metrics' ORDER BY id"
    for (text,) in db.execute(query, (trial,)):
        marks.filter_new(payload_rows(json.loads(text)))
    return marks


def waiting_trials(db: sqlite3.Connection) -> list[int]:
    """Return the trials with anything to deliver but artifacts."""
    query = (
        "SELECT trial FROM records WHERE kind != 'artifact' "
        "UNION SELECT trial FROM logs WHERE waits ORDER BY trial"
    )
    return [trial for (trial,) in db.execute(query)]


def count_waiting(db: sqlite3.Connection) -> int:
    """Return how many records wait; what waits of a trial's log counts as one."""
    query = "SELECT (SELECT COUNT(*) FROM records) + (SELECT COUNT(*) FROM logs WHERE waits)"
    return int(db.execute(query).fetchone()[0])


def _read_target(db: sqlite3.Connection, trial: int, *, waiting: bool = False) -> Target | None:
    """Return a log's target; None without one, and, if `waiting`, once the log has reached it."""
    query = "SELECT step, every, ended FROM logs WHERE trial = ? AND waits >= ?"
    row = db.execute(query, (trial, waiting)).fetchone()
    return Target(row[0], row[1], bool(row[2])) if row else None


def _set_read(db: sqlite3.Connection, trial: int, target: Target) -> None:
    """Note that a log has reached its target, unless that has changed since."""
    query = "UPDATE logs SET waits = 0 WHERE trial = ? AND step = ? AND every = ? AND ended = ?"
    db.execute(query, (trial, *target))


def _count_correction(db: sqlite3.Connection) -> None:
    set_meta(db, _CORRECTIONS, str(int(read_meta(db, _CORRECTIONS) or 0) + 1))


def _insert(db: sqlite3.Connection, trial: int, kind: Kind, payload: str) -> None:
    db.execute(
        "INSERT INTO records (trial, kind, payload) VALUES (?, ?, ?)", (trial, kind, payload)
    )


def describe_blocked(db: sqlite3.Connection) -> str | None:
    """A message with the number of blocked artifacts and the reason; None if none is blocked."""
    query = "SELECT COUNT(*) FROM records WHERE kind = 'artifact'"
    count, reason = db.execute(query).fetchone()[0], read_meta(db, _BLOCKED)
    if not (count and reason):
        return None
    return f"{count} {'artifact waits' if count == 1 else 'artifacts wait'}: {reason}"


def _count_unacked_creates(db: sqlite3.Connection) -> int:
    return int(read_meta(db, _UNACKED_CREATES) or 0)
