"""A durable queue between the sweep and the tracking server: one SQLite file, short transactions.

An append commits without an fsync: it survives the death of the process. Before a metric record is
sent, it is marked in flight and the mark is synced, with one fsync for many trials. So after any
crash, a power failure included, the outbox knows which records may already be at the server. What
must not live here: anything about servers; see `tracking.delivery`.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tracking.limits import MAX_POINTS
from tracking.metric_points import HighWaterMarks, MetricRow, pack, parts, unpack
from tracking.outbox_file import (
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

Kind = Literal["start", "metrics", "tags", "experiment", "artifact", "finish", "replace"]
QUEUED, IN_FLIGHT = 0, 1
"""States of a record. IN_FLIGHT marks metrics that may already have been sent."""
Stored = tuple[int, Kind, int, int]
"""A record's id, kind, state and number of points."""


@dataclass(frozen=True)
class Record:
    """One queued call. Its payload is a list of points for metrics, else parsed JSON."""

    id: int
    kind: Kind
    payload: Any


@dataclass(frozen=True)
class Batch:
    """Records of one trial to deliver together, in their order.

    A batch is one artifact, or the experiment's tags, or the replacement of a run, or the records
    of one request to a run: an optional start, metrics and tags, an optional finish. Records
    queued after an artifact may be delivered before it.
    """

    trial: int
    records: list[Record]
    uncertain: bool
    """The outcome of an earlier attempt is unknown: the server may already have some points."""


def coalesce(rows: Iterable[Stored]) -> list[Stored]:
    """Return the oldest of a trial's records that fit into one batch."""
    taken: list[Stored] = []
    num_points, metrics_state = 0, None
    for row in rows:
        _, kind, state, points = row
        num_points += points
        if taken and not (
            taken[-1][1] in ("start", "metrics", "tags")
            and kind in ("metrics", "tags", "finish")
            and (kind != "metrics" or metrics_state in (None, state))
            and num_points <= MAX_POINTS
        ):
            break
        taken.append(row)
        if kind == "metrics":
            metrics_state = state
    return taken


SWEEP = -1
"""Stands for the sweep's own run where a trial's number is expected."""

LOST = "LOST"
"""Stands for the last status of a run that the server no longer has."""

_MAX_RECORDS = 256
_STORE = "store"
_CORRECTIONS = "corrections"
"""Key of the number of corrections to marks; other processes reload theirs when it changes."""

_UNACKED_CREATES = "unanswered"
"""Key of the number of requests to create a run whose outcome is unknown."""

_BLOCKED = "held"
"""Key of the reason why artifacts could not be stored."""

_NEEDS_FIGURES = "lacks_pictures"
"""Key that is set while the figures must be sent again, to a new store or a new run."""


class _Prepared(NamedTuple):
    """A trial's next records, marked on the disk and not yet sent."""

    last_id: int
    uncertain: bool


class Outbox(OutboxFile):
    """The queue in one directory. Its methods may be called from any thread.

    Several processes may have it open; each sees what the others have written.
    """

    def __init__(self, directory: Path, *, delivers: bool = False) -> None:
        self._staging = Staging(directory)
        self._marks: dict[int, HighWaterMarks] = {}
        self._prepared: dict[int, _Prepared] = {}
        self._left = 0
        self._corrections: str | None = None
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
            _insert(db, trial, kind, 1, text)
            if kind in ("start", "finish"):
                status = "RUNNING" if kind == "start" else payload.get("told", payload["status"])
                db.execute(
                    "INSERT INTO told VALUES (?, ?) ON CONFLICT (trial) "
                    "DO UPDATE SET status = excluded.status WHERE status != ?",
                    (trial, status, LOST),
                )

    def append_rows(self, trial: int, rows: Iterable[MetricRow]) -> int:
        """Queue the points of `rows` above the trial's marks."""
        with self._lock:
            with self._transaction() as db:
                marks = self._load_marks(trial).copy()  # kept only if the commit succeeds
                packed = list(parts(marks.filter_new(rows)))
                if not packed:
                    return 0
                for part, num_points in packed:
                    state = QUEUED if marks.are_complete else IN_FLIGHT
                    _insert(db, trial, "metrics", num_points, pack(part), state)
                save_marks(db, trial, marks)
            self._marks[trial] = marks
        return sum(num_points for _, num_points in packed)

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
        """The highest step that was queued for a trial; 0 if none was."""
        with self._lock:
            return max(self._load_marks(trial).steps.values(), default=0)

    @property
    def pending(self) -> int:
        """How many records wait; after `close`, how many waited at that moment."""
        with self._lock:
            return self._left if self._closed else self._count()

    # -- called by the delivery -------------------------------------------------------------------

    def trials(self) -> list[int]:
        """The trials with waiting records other than artifacts, the sweep's own run first."""
        with self._lock:
            return [
                trial
                for (trial,) in self._db.execute(
                    "SELECT DISTINCT trial FROM records WHERE kind != 'artifact' ORDER BY trial"
                )
            ]

    def prepare(self, trials: Iterable[int], *, single: bool = False) -> None:
        """Mark the next metrics of each trial as in flight, with one fsync for all trials."""
        limit = 1 if single else _MAX_RECORDS
        query = (
            "SELECT id, kind, state, points FROM records "
            "WHERE trial = ? AND kind != 'artifact' ORDER BY id LIMIT ?"
        )
        prepared: dict[int, _Prepared] = {}
        sent_next: list[tuple[int, int, int]] = []
        any_metrics = False
        with self._lock:
            for trial in trials:
                if trial in self._prepared and not single:
                    continue
                taken = coalesce(self._db.execute(query, (trial, limit)).fetchall())
                if not taken:
                    continue
                last_id = taken[-1][0]
                states = {state for _, kind, state, _ in taken if kind == "metrics"}
                prepared[trial] = _Prepared(last_id, uncertain=IN_FLIGHT in states)
                any_metrics |= bool(states)
                if QUEUED in states:
                    sent_next.append((IN_FLIGHT, trial, last_id))
            if sent_next:  # a transaction blocks appends: keep it short
                with self._transaction() as db:
                    db.executemany(
                        "UPDATE records SET state = ? "
                        "WHERE trial = ? AND kind = 'metrics' AND id <= ?",
                        sent_next,
                    )
        if any_metrics:  # also for earlier marks: they may not be on the disk yet
            self._sync()
        self._prepared.update(prepared)

    def next_batch(self, trial: int, *, single: bool = False) -> Batch | None:
        """Return the trial's oldest records, without artifacts and with at most 1,000 points.

        A batch never mixes metrics that may have been sent with metrics that were not sent.
        """
        self.prepare([trial], single=single)
        prepared = self._prepared.pop(trial, None)
        if prepared is None:
            return None
        with self._lock:
            rows = self._db.execute(
                "SELECT id, kind, payload FROM records "
                "WHERE trial = ? AND kind != 'artifact' AND id <= ? ORDER BY id",
                (trial, prepared.last_id),
            ).fetchall()
        if not rows:  # another process has dropped them; see `replace_run`
            return None
        records = [
            Record(id_, kind, (unpack if kind == "metrics" else json.loads)(payload))
            for id_, kind, payload in rows
        ]
        return Batch(trial, records, prepared.uncertain)

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
        return Batch(trial, [Record(id_, "artifact", json.loads(payload))], uncertain=False)

    def mark_blocked(self, reason: str) -> str | None:
        """Store why artifacts are blocked, until one is delivered; return a message about it."""
        with self._lock, self._transaction() as db:
            set_meta(db, _BLOCKED, reason)
            return describe_blocked(db)

    def delivered(self, batch: Batch) -> None:
        """Remove records that the server acknowledged."""
        with self._lock, self._transaction() as db:
            db.executemany(
                "DELETE FROM records WHERE id = ?", [(record.id,) for record in batch.records]
            )
            if batch.records[0].kind == "experiment":
                set_meta(db, "experiment_tags", json.dumps(list(batch.records[0].payload)))
            if batch.records[0].kind == "artifact":
                delete_meta(db, _BLOCKED)
            if batch.records[0].kind == "replace":  # another process may just have found the run
                db.execute("DELETE FROM runs WHERE trial = ?", (batch.trial,))
        for record in batch.records:
            if record.kind == "artifact":
                self._staging.remove(record.payload)

    def refuse(self, batch: Batch, reason: str) -> None:
        """Move records that the server rejects for good out of the queue, into `refused`."""
        with self._lock, self._transaction() as db:
            for record in batch.records:
                db.execute(
                    "INSERT INTO refused (trial, kind, payload, reason) "
                    "SELECT trial, kind, payload, ? FROM records WHERE id = ?",
                    (reason, record.id),
                )
                db.execute("DELETE FROM records WHERE id = ?", (record.id,))
            if batch.records[0].kind == "artifact":
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
        """Store a trial's run id."""
        with self._lock, self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (trial, run_id))
            if recorded is None:
                set_meta(db, _UNACKED_CREATES, str(max(_count_unacked_creates(db) - 1, 0)))
                return
            marks = read_marks(db, trial)
            marks.merge_max(recorded)
            self._correct_marks(db, trial, marks)

    def replace_run(self, trial: int) -> None:
        """Record a trial in a new run, from its beginning; the run that it had is removed.

        What waits for the old run is dropped. A second call before the new run exists changes
        nothing at the server.
        """
        with self._lock, self._transaction() as db:
            found = db.execute("SELECT run_id FROM runs WHERE trial = ?", (trial,)).fetchone()
            # First, as SQLite gives the ids of deleted records again, and another process may be
            # delivering these records now.
            _insert(db, trial, "replace", 1, json.dumps({"run_ids": list(found or ())}))
            db.execute("DELETE FROM records WHERE trial = ? AND kind != 'replace'", (trial,))
            for table in ("runs", "told"):
                db.execute(f"DELETE FROM {table} WHERE trial = ?", (trial,))
            self._correct_marks(db, trial, HighWaterMarks())

    def note_replaced(self, record: Record, run_ids: Iterable[str]) -> None:
        """Store which runs a replacement removes, before their tags name no trial any more."""
        text = json.dumps({"run_ids": list(run_ids)})
        with self._lock, self._transaction() as db:
            db.execute("UPDATE records SET payload = ? WHERE id = ?", (text, record.id))

    def reset_run(self, trial: int) -> None:
        """Delete the id of a run that the server no longer has, so that it can be recorded again.

        The whole trial may be logged again, with points that are still queued. So from now on each
        point of the trial is compared with the server before it is sent. The current recorder
        continues where it is; the next process that opens the outbox records from the beginning.
        """
        with self._lock, self._transaction() as db:
            db.execute("DELETE FROM runs WHERE trial = ?", (trial,))
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
            for table in ("runs", "told", "marks"):
                db.execute(f"DELETE FROM {table}")
            delete_meta(db, "experiment_id", "experiment_tags", _BLOCKED)
            # These are sent again from the ledger and the trials' metrics.jsonl.
            db.execute("DELETE FROM records WHERE kind IN ('start', 'metrics', 'finish')")
        self._marks.clear()

    def reset_trials(self, trials: Mapping[int, bool]) -> None:
        """Record some trials again from their beginning, because the store lost part of them.

        Each point is compared with the store before it is sent, so that none is written twice.
        """
        for trial, is_gone in trials.items():
            with self._lock, self._transaction() as db:
                if is_gone:
                    set_meta(db, _NEEDS_FIGURES, "yes")
                    db.execute("DELETE FROM runs WHERE trial = ?", (trial,))
                db.execute("DELETE FROM told WHERE trial = ?", (trial,))
                self._correct_marks(db, trial, HighWaterMarks(are_complete=False))
        self._marks.clear()

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
            return int(self._db.execute("SELECT COUNT(*) FROM records").fetchone()[0])
        except sqlite3.Error as error:
            raise outbox_error(self._path, error) from error

    def _load_marks(self, trial: int) -> HighWaterMarks:
        """Return a trial's marks: the recorder raises them, the delivery corrects them."""
        if (corrections := read_meta(self._db, _CORRECTIONS)) != self._corrections:
            self._corrections = corrections
            self._marks.clear()
        if trial not in self._marks:
            self._marks[trial] = read_marks(self._db, trial)
        return self._marks[trial]

    def _correct_marks(self, db: sqlite3.Connection, trial: int, marks: HighWaterMarks) -> None:
        """Replace a trial's marks, and treat all its queued metrics as possibly sent.

        Other processes that have the outbox open reload their marks.
        """
        save_marks(db, trial, marks)
        set_meta(db, _CORRECTIONS, str(int(read_meta(db, _CORRECTIONS) or 0) + 1))
        db.execute(
            "UPDATE records SET state = ? WHERE trial = ? AND kind = 'metrics'",
            (IN_FLIGHT, trial),
        )
        self._prepared.pop(trial, None)


def _insert(
    db: sqlite3.Connection,
    trial: int,
    kind: Kind,
    num_points: int,
    payload: str | bytes,
    state: int = QUEUED,
) -> None:
    db.execute(
        "INSERT INTO records (trial, kind, state, points, payload) VALUES (?, ?, ?, ?, ?)",
        (trial, kind, state, num_points, payload),
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
