"""Read an outbox from another process, without a server and without blocking its writer.

What must not live here: anything that writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracking.metric_points import HighWaterMarks, MetricRow
from tracking.outbox import (
    LOST,
    SWEEP,
    count_waiting,
    describe_blocked,
    queued_marks,
    waiting_trials,
)
from tracking.outbox_file import FILE_NAME, OutboxError, check_file, check_tables, read_meta


@dataclass(frozen=True)
class DeliveryStatus:
    """What an outbox contains, and what it knows of the server."""

    pending: int
    refused: int
    """Records that the server rejected for good; they are kept and not sent again."""
    experiment_id: str | None
    sweep_run_id: str | None
    run_ids: dict[int, str]
    """Run ids by trial."""
    tracked_statuses: dict[int, str] = field(default_factory=dict)
    """The status last queued for each trial's run. A trial has none if it was never recorded, or
    if the server lost its run and it must be recorded from the beginning."""
    tracked_sweep_status: str | None = None
    """The same for the sweep's own run."""
    marks: dict[int, HighWaterMarks] = field(default_factory=dict)
    """How far each trial's metrics were sent, or are queued besides its log."""

    waiting: frozenset[int] = frozenset()
    """The trials with anything waiting but artifacts; `SWEEP` for the sweep's run."""
    experiment_tags: frozenset[str] = frozenset()
    """The names of the tags last set on the experiment."""
    blocked_artifacts: str | None = None
    """How many artifacts cannot be stored although the server answers, and why; else None."""
    notifications: int = 0
    """How many notifications wait for the webhook."""
    damage: str | None = None
    """A message about a damaged file, which is treated as empty; None when it is intact."""

    def lacks(self, trial: int, rows: Iterable[MetricRow]) -> bool:
        """Whether some rows that are not in a trial's log were never queued."""
        return bool(self.marks.get(trial, HighWaterMarks()).copy().filter_new(rows))


_EMPTY = DeliveryStatus(0, 0, None, None, {})
_WITH_MARKS = """
SELECT trial FROM (
    SELECT trial FROM marks UNION SELECT trial FROM records WHERE kind = 'metrics')
WHERE trial = coalesce(?, trial)
"""


def read_outbox(directory: Path, trial: int | None = None) -> DeliveryStatus:
    """Read an outbox that another process may be using.

    A missing or damaged outbox counts as empty: its next writer moves a damaged file aside.
    """
    path = directory / FILE_NAME
    if not os.path.lexists(path):
        return _EMPTY
    try:
        check_file(path)
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        ) as db:
            check_tables(db)
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                return _EMPTY  # its writer has not created the tables yet
            runs = _texts(db.execute("SELECT trial, run_id FROM runs ORDER BY trial"))
            tracked = _texts(db.execute("SELECT trial, status FROM told"))
            lost = {trial for trial, status in tracked.items() if status == LOST}
            tracked = {trial: status for trial, status in tracked.items() if trial not in lost}
            tracked_sweep_status = tracked.pop(SWEEP, None)
            return DeliveryStatus(
                pending=count_waiting(db),
                refused=db.execute("SELECT COUNT(*) FROM refused").fetchone()[0],
                experiment_id=read_meta(db, "experiment_id"),
                sweep_run_id=runs.pop(SWEEP, None),
                run_ids=runs,
                tracked_statuses=tracked,
                tracked_sweep_status=tracked_sweep_status,
                marks={
                    number: queued_marks(db, number)
                    for (number,) in db.execute(_WITH_MARKS, (trial,)).fetchall()
                    if number not in lost
                },
                blocked_artifacts=describe_blocked(db),
                waiting=frozenset(waiting_trials(db)),
                notifications=db.execute(
                    "SELECT COUNT(*) FROM notifications WHERE NOT delivered"
                ).fetchone()[0],
                experiment_tags=frozenset(json.loads(read_meta(db, "experiment_tags") or "[]")),
            )
    except sqlite3.OperationalError as error:
        raise OutboxError(
            f"cannot read the outbox {path}: {error}; you must be able to read and write this "
            "file of the sweep; correct its permissions"
        ) from error
    # SQLite may detect a flipped bit, or may return a wrong value
    except (sqlite3.DatabaseError, ValueError, TypeError, RecursionError) as error:
        return replace(
            _EMPTY,
            damage=f"the outbox {path} is damaged ({error}); the trials' own files and the server "
            "have its content; a resume moves it aside and delivers what the server lacks",
        )


def _texts(rows: Iterable[tuple[Any, Any]]) -> dict[int, str]:
    """Return texts by trial, with their types checked: SQLite stores any value in any column."""
    texts = dict(rows)
    for trial, text in texts.items():
        if not (isinstance(trial, int) and isinstance(text, str)):
            raise ValueError(f"it holds {trial!r} and {text!r} where a trial and a text belong")
    return texts
