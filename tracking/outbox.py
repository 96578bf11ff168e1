"""A durable queue between the sweep and the tracking server: one SQLite file, short transactions.

An append commits without waiting for the disk: it survives the death of the process. Before a
metric record is sent it is marked in flight and that mark is synced, one sync for many trials, so
after any crash, a power failure included, the queue knows which records may already be at the
server. What must not live here: anything about servers; see `tracking.delivery`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tracking.artifact_staging import Staging, sync_path
from tracking.batching import IN_FLIGHT, QUEUED, Batch, Kind, Record, coalesce
from tracking.metric_points import HighWaterMarks, MetricRow, pack, parts, unpack
from tracking.outbox_file import FILE_NAME, OutboxError, move_aside, open_file, read_meta

SWEEP = -1
"""The sweep's own run, where a trial's number is expected."""

LOST = "LOST"
"""What was told of a run that the server no longer has, where the status told last is expected."""

_MAX_RECORDS = 256
_STORE = "store"
_CORRECTIONS = "corrections"
"""How often marks were corrected."""

_UNANSWERED = "unanswered"
"""How many creates of runs had an unknown end."""

_HELD = "held"
"""Why artifacts wait that could not be stored."""

_LACKS_PICTURES = "lacks_pictures"
"""There while a store, or a run, is another one than was given pictures."""


class _Prepared(NamedTuple):
    """What comes next of a trial, marked on the disk and not yet sent."""

    last_id: int
    uncertain: bool


class Outbox:
    """The queue in one directory. Its methods may be called from any thread.

    Another process may have it open, too; each reads what the other has written.

    Args:
        directory: Created when it is missing. A file that is not a database is moved aside.
        delivers: Opened to deliver only, perhaps while another one fills it.

    Raises:
        OutboxError: The directory cannot be written, or a newer version wrote the file.
    """

    def __init__(self, directory: Path, *, delivers: bool = False) -> None:
        self.directory = directory
        self._path = directory / FILE_NAME
        self._staging = Staging(directory)
        self._lock = threading.Lock()
        self._marks: dict[int, HighWaterMarks] = {}
        self._prepared: dict[int, _Prepared] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            # Its owner's alone: who can open it can lock it, and keep everybody from delivering.
            self._owner = os.open(directory / "drain.lock", flags, 0o600)
            if os.fstat(self._owner).st_uid == os.geteuid():
                os.fchmod(self._owner, 0o600)
        except OSError as error:
            raise OutboxError(f"cannot write the outbox {directory}: {error}") from error
        try:
            try:
                self._db = open_file(self._path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                # Nothing in a torn file can be trusted. The server's own history then says what
                # was delivered, and the trials' metrics.jsonl hold the rest.
                self.moved_aside: Path | None = move_aside(self._path)
                self._db = open_file(self._path)
            else:
                self.moved_aside = None
        except sqlite3.Error as error:
            os.close(self._owner)
            raise self._error(error) from error
        self._closed = False
        self._left = 0
        self._corrections: str | None = None
        if not delivers:  # else what is being staged has no record yet, and may be taken for one
            query = "SELECT payload FROM records WHERE kind = 'artifact'"
            self._staging.keep_only(json.loads(text) for (text,) in self._db.execute(query))
            self._begin_again()
            if self.moved_aside is not None:  # with what waited in it
                with self._lock, self._transaction() as db:
                    _remember(db, _LACKS_PICTURES, "yes")

    # -- the sweep's side -------------------------------------------------------------------------

    def append(self, trial: int, kind: Kind, payload: Mapping[str, Any]) -> None:
        """Queue one record.

        Raises:
            OutboxError: It could not be written; nothing changed.
        """
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
        """Queue the points of `rows` that lie above the trial's marks.

        Returns:
            How many points were queued.

        Raises:
            OutboxError: They could not be written; nothing changed.
        """
        with self._lock:
            with self._transaction() as db:
                marks = self._load_marks(trial).copy()  # kept only if the commit succeeds
                packed = list(parts(marks.filter_new(rows)))
                if not packed:
                    return 0
                for part, num_points in packed:
                    state = QUEUED if marks.are_complete else IN_FLIGHT
                    _insert(db, trial, "metrics", num_points, pack(part), state)
                _save_marks(db, trial, marks)
            self._marks[trial] = marks
        return sum(num_points for _, num_points in packed)

    def append_artifact(self, trial: int, path: Path, name: str) -> None:
        """Queue a copy of a file, which is on the disk before its record can be.

        Raises:
            ValueError: `name` is not a relative path.
            OutboxError: The file could not be copied or the record not be written.
        """
        payload = self._staging.copy(path, name)
        try:
            self.append(trial, "artifact", payload)
        except BaseException:  # also an interruption leaves no copy behind; raised again
            self._staging.remove(payload)
            raise

    def find_artifact(self, staged: str) -> Path:
        """Return where a copy lies; see `Staging.find`."""
        return self._staging.find(staged)

    def last_step(self, trial: int) -> int:
        """The highest step of a trial that was ever queued, 0 before the first."""
        with self._lock:
            return max(self._load_marks(trial).steps.values(), default=0)

    @property
    def pending(self) -> int:
        """How many records wait; after `close`, how many did then."""
        with self._lock:
            return self._left if self._closed else self._count()

    # -- the sender's side ------------------------------------------------------------------------

    def try_lock(self) -> bool:
        """Become the one process that delivers; False while another one is."""
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

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
        """Mark the metrics that come next of each trial as in flight, unless they are already.

        The disk is waited for once, however many trials there are.

        Args:
            single: Of each trial one record only, whatever was prepared.
        """
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
            if sent_next:  # and only then, for as short as can be: appends wait for it
                with self._transaction() as db:
                    db.executemany(
                        "UPDATE records SET state = ? "
                        "WHERE trial = ? AND kind = 'metrics' AND id <= ?",
                        sent_next,
                    )
        if any_metrics:  # a mark that was there already may not be on the disk either
            self._sync()
        self._prepared.update(prepared)

    def next_batch(self, trial: int, *, single: bool = False) -> Batch | None:
        """Take the trial's oldest records but artifacts, at most 1,000 points, as prepared.

        Metrics that may have been sent do not come together with others.

        Args:
            single: Take one record only.

        Returns:
            What to deliver next, or None when the trial has nothing left.
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
        records = [
            Record(id_, kind, (unpack if kind == "metrics" else json.loads)(payload))
            for id_, kind, payload in rows
        ]
        return Batch(trial, records, prepared.uncertain)

    def claim_artifact(self, after: int) -> Batch | None:
        """Take an artifact before which nothing of its trial waits, or None.

        Args:
            after: Trials take turns: the next one after this trial comes first.
        """
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
        """Remember why artifacts wait, until one is delivered; returns how many do, and why."""
        with self._lock, self._transaction() as db:
            _remember(db, _HELD, reason)
            return held(db)

    def delivered(self, batch: Batch) -> None:
        """Remove records that the server acknowledged."""
        with self._lock, self._transaction() as db:
            db.executemany(
                "DELETE FROM records WHERE id = ?", [(record.id,) for record in batch.records]
            )
            if batch.records[0].kind == "experiment":
                _remember(db, "experiment_tags", json.dumps(list(batch.records[0].payload)))
            if batch.records[0].kind == "artifact":
                _forget(db, _HELD)
        for record in batch.records:
            if record.kind == "artifact":
                self._staging.remove(record.payload)

    def refuse(self, batch: Batch, reason: str) -> None:
        """Set records aside that the server will never take, so that they hold up nothing."""
        with self._lock, self._transaction() as db:
            for record in batch.records:
                db.execute(
                    "INSERT INTO refused (trial, kind, payload, reason) "
                    "SELECT trial, kind, payload, ? FROM records WHERE id = ?",
                    (reason, record.id),
                )
                db.execute("DELETE FROM records WHERE id = ?", (record.id,))
            if batch.records[0].kind == "artifact":
                _forget(db, _HELD)

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
        """Note that the server is asked to create a run, until `set_run_id` knows its id."""
        with self._lock, self._transaction() as db:
            _remember(db, _UNANSWERED, str(_count_unanswered(db) + 1))

    @property
    def num_unacked_creates(self) -> int:
        """How many creates had an unknown end: each may reach the server yet."""
        with self._lock:
            return _count_unanswered(self._db)

    def creates_settled(self) -> None:
        """No create can reach the server any more."""
        with self._lock, self._transaction() as db:
            _remember(db, _UNANSWERED, "0")

    def set_run_id(self, trial: int, run_id: str, held: HighWaterMarks | None) -> None:
        """Remember a run.

        Args:
            held: What the server already holds, when the run existed and this queue did not know
                it: marks are raised to it, and what is queued is compared before it is sent.
                None: it was created.
        """
        with self._lock, self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (trial, run_id))
            if held is None:
                _remember(db, _UNANSWERED, str(max(_count_unanswered(db) - 1, 0)))
                return
            marks = _read_marks(db, trial)
            marks.merge_max(held)
            self._correct_marks(db, trial, marks)

    def reset_run(self, trial: int) -> None:
        """Forget a run that the server no longer has, so that it can be recorded anew.

        Everything may be logged again then, also what is still queued: from now on each point of
        the trial is compared with the server before it is sent. Whoever tells of the trial now
        goes on where it is: that it was told is not known until another one fills this queue.
        """
        with self._lock, self._transaction() as db:
            db.execute("DELETE FROM runs WHERE trial = ?", (trial,))
            db.execute("INSERT OR REPLACE INTO told VALUES (?, ?)", (trial, LOST))
            self._correct_marks(db, trial, HighWaterMarks(are_complete=False))

    def set_target(self, store: str, *, gone: bool) -> None:
        """Deliver to a store from now on. What was told to another one is forgotten, so that it
        can be told again; what the store does hold is found there, and compared.

        Args:
            store: Tells it from others.
            gone: What it was told is not there.
        """
        with self._lock, self._transaction() as db:
            before = read_meta(db, _STORE) or store
            _remember(db, _STORE, store)
            delivered = db.execute("SELECT 1 FROM runs").fetchone() is not None
            if not delivered or (before == store and not gone):
                return
            _remember(db, _LACKS_PICTURES, "yes")
            for table in ("runs", "told", "marks"):
                db.execute(f"DELETE FROM {table}")
            _forget(db, "experiment_id", "experiment_tags", _HELD)
            # Of these the ledger and the trials' curves know all.
            db.execute("DELETE FROM records WHERE kind IN ('start', 'metrics', 'finish')")
        self._marks.clear()

    def tell_again(self, trials: Mapping[int, bool]) -> None:
        """Have trials told from their beginning, because the store lacks part of what it was told.

        Each point is compared with the store before it is sent, so that nothing comes twice.

        Args:
            trials: Of each, whether its run is gone altogether.
        """
        for trial, is_gone in trials.items():
            with self._lock, self._transaction() as db:
                if is_gone:
                    _remember(db, _LACKS_PICTURES, "yes")
                    db.execute("DELETE FROM runs WHERE trial = ?", (trial,))
                db.execute("DELETE FROM told WHERE trial = ?", (trial,))
                self._correct_marks(db, trial, HighWaterMarks(are_complete=False))
        self._marks.clear()

    @property
    def needs_figures(self) -> bool:
        """Whether pictures went to another store, or to a run that is gone."""
        with self._lock:
            return read_meta(self._db, _LACKS_PICTURES) is not None

    def figures_sent(self) -> None:
        """The pictures of all trials were queued once more."""
        with self._lock, self._transaction() as db:
            _forget(db, _LACKS_PICTURES)

    @property
    def experiment_id(self) -> str | None:
        """The id of the experiment that was found last, or None before the first."""
        with self._lock:
            return read_meta(self._db, "experiment_id")

    def found(self, experiment_id: str) -> None:
        """Remember the experiment."""
        with self._lock, self._transaction() as db:
            _remember(db, "experiment_id", experiment_id)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OutboxError):
                    self._left = self._count()
                self._closed = True
                self._db.close()
                os.close(self._owner)

    # -- inside -----------------------------------------------------------------------------------

    def _begin_again(self) -> None:
        """Have what was lost told from its beginning: the marks are of what came after."""
        query = "SELECT trial FROM told WHERE status = ?"
        self.tell_again(
            dict.fromkeys((trial for (trial,) in self._db.execute(query, (LOST,))), True)
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._closed:
            raise OutboxError(
                f"the outbox {self._path} is closed; nothing can be recorded any more"
            )
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:  # no transaction stays open, whatever ended it; raised again
                if self._db.in_transaction:  # SQLite itself rolls back when the disk is full
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _count(self) -> int:
        try:
            return int(self._db.execute("SELECT COUNT(*) FROM records").fetchone()[0])
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _sync(self) -> None:
        """Wait until everything committed is on disk, without holding up appends meanwhile.

        Commits go to the write-ahead log unsynced; a checkpoint syncs the log before it moves
        pages. So syncing the log as it is now covers every commit so far. SQLite locks other files
        than the log, so closing it here drops no lock.
        """
        sync_path(Path(f"{self._path}-wal"))

    def _load_marks(self, trial: int) -> HighWaterMarks:
        """Return a trial's marks: who queues raises them, who delivers corrects them."""
        if (corrections := read_meta(self._db, _CORRECTIONS)) != self._corrections:
            self._corrections = corrections
            self._marks.clear()
        if trial not in self._marks:
            self._marks[trial] = _read_marks(self._db, trial)
        return self._marks[trial]

    def _correct_marks(self, db: sqlite3.Connection, trial: int, marks: HighWaterMarks) -> None:
        """Replace a trial's marks, so that whoever knows others reads them again; and treat all
        its queued metrics as if they might have been sent.
        """
        _save_marks(db, trial, marks)
        _remember(db, _CORRECTIONS, str(int(read_meta(db, _CORRECTIONS) or 0) + 1))
        db.execute(
            "UPDATE records SET state = ? WHERE trial = ? AND kind = 'metrics'",
            (IN_FLIGHT, trial),
        )
        self._prepared.pop(trial, None)

    def _error(self, error: sqlite3.Error) -> OutboxError:
        free = shutil.disk_usage(self.directory).free
        return OutboxError(
            f"the outbox {self._path} cannot be used: {error}; {free} bytes are free on that "
            "disk; what it holds is untouched; free space or correct the permissions, then resume"
        )


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


def held(db: sqlite3.Connection) -> str | None:
    """How many artifacts wait, and why; None unless one of them could not be stored."""
    query = "SELECT COUNT(*) FROM records WHERE kind = 'artifact'"
    count, reason = db.execute(query).fetchone()[0], read_meta(db, _HELD)
    if not (count and reason):
        return None
    return f"{count} {'artifact waits' if count == 1 else 'artifacts wait'}: {reason}"


def _remember(db: sqlite3.Connection, key: str, value: str) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def _forget(db: sqlite3.Connection, *keys: str) -> None:
    db.executemany("DELETE FROM meta WHERE key = ?", [(key,) for key in keys])


def _count_unanswered(db: sqlite3.Connection) -> int:
    return int(read_meta(db, _UNANSWERED) or 0)


def _save_marks(db: sqlite3.Connection, trial: int, marks: HighWaterMarks) -> None:
    text = json.dumps([marks.steps, marks.num_infinite, marks.are_complete])
    db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", (trial, text))


def _read_marks(db: sqlite3.Connection, trial: int) -> HighWaterMarks:
    row = db.execute("SELECT marks FROM marks WHERE trial = ?", (trial,)).fetchone()
    return HighWaterMarks(*json.loads(row[0])) if row else HighWaterMarks()
