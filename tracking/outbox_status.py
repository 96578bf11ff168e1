"""Looking into an outbox from another process, without a server and without disturbing its writer.

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
from tracking.outbox import LOST, SWEEP, held
from tracking.outbox_file import FILE_NAME, OutboxError, check_file, check_tables, read_meta


@dataclass(frozen=True)
class DeliveryStatus:
    """What an outbox knows about the server, read without one."""

    pending: int
    refused: int
    """Records that the server will never take; they are kept and not sent any more."""
    experiment_id: str | None
    sweep_run_id: str | None
    run_ids: dict[int, str]
    """Run ids by trial."""
    told: dict[int, str] = field(default_factory=dict)
    """The status last queued for each trial's run; a trial that was never recorded has none, and
    one is to be recorded from its beginning whose run the server has lost."""
    sweep_told: str | None = None
    """The same for the sweep's own run."""
    marks: dict[int, HighWaterMarks] = field(default_factory=dict)
    """What was queued of each trial's metrics."""

    waiting: frozenset[int] = frozenset()
    """The trials of which something waits other than artifacts; `SWEEP` for the sweep's run."""
    experiment_tags: frozenset[str] = frozenset()
    """The names of those that the experiment was given last."""
    held: str | None = None
    """How many artifacts wait although the server answers, and why; None when none failed."""
    damage: str | None = None
    """A sentence about a file that holds nothing which can be read; None when it is sound."""

    def lacks(self, trial: int, rows: Iterable[MetricRow]) -> bool:
        """Whether some of a trial's rows were never queued."""
        return bool(self.marks.get(trial, HighWaterMarks()).copy().filter_new(rows))


_EMPTY = DeliveryStatus(0, 0, None, None, {})


def read_outbox(directory: Path, trial: int | None = None) -> DeliveryStatus:
    """Read an outbox that another process may be using. A missing one is empty, and so is a
    damaged one: its next writer sets it aside.

    Args:
        trial: Whose marks are read; None: everybody's.

    Raises:
        OutboxError: The file cannot be opened.
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
                return _EMPTY  # its writer has opened it and not yet made the tables
            runs = _texts(db.execute("SELECT trial, run_id FROM runs ORDER BY trial"))
            told = _texts(db.execute("SELECT trial, status FROM told"))
            lost = {trial for trial, status in told.items() if status == LOST}
            told = {trial: status for trial, status in told.items() if trial not in lost}
            sweep_told = told.pop(SWEEP, None)
            return DeliveryStatus(
                pending=db.execute("SELECT COUNT(*) FROM records").fetchone()[0],
                refused=db.execute("SELECT COUNT(*) FROM refused").fetchone()[0],
                experiment_id=read_meta(db, "experiment_id"),
                sweep_run_id=runs.pop(SWEEP, None),
                run_ids=runs,
                told=told,
                sweep_told=sweep_told,
                marks={
                    number: HighWaterMarks(*json.loads(text))
                    for number, text in db.execute(
                        "SELECT trial, marks FROM marks WHERE trial = coalesce(?, trial)", (trial,)
                    )
                    if number not in lost
                },
                held=held(db),
                waiting=frozenset(
                    trial
                    for (trial,) in db.execute(
                        "SELECT DISTINCT trial FROM records WHERE kind != 'artifact'"
                    )
                ),
                experiment_tags=frozenset(json.loads(read_meta(db, "experiment_tags") or "[]")),
            )
    except sqlite3.OperationalError as error:
        raise OutboxError(
            f"cannot read the outbox {path}: {error}; it is a file of the sweep's, which must be "
            "yours to read and write; correct its permissions"
        ) from error
    # a flipped bit may surface in the database, or in what was read of it
    except (sqlite3.DatabaseError, ValueError, TypeError, RecursionError) as error:
        return replace(
            _EMPTY,
            damage=f"the outbox {path} is damaged ({error}); the trials' own files and the server "
            "know what was in it; a resume sets it aside and delivers what the server lacks",
        )


def _texts(rows: Iterable[tuple[Any, Any]]) -> dict[int, str]:
    """Return texts by trial; SQLite stores any value in any column.

    Raises:
        ValueError: A value has another type.
    """
    texts = dict(rows)
    for trial, text in texts.items():
        if not (isinstance(trial, int) and isinstance(text, str)):
            raise ValueError(f"it holds {trial!r} and {text!r} where a trial and a text belong")
    return texts


def pending(directory: Path) -> int:
    """How many records wait in the outbox of `directory`, read from any process."""
    return read_outbox(directory).pending
