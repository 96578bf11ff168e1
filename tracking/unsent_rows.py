"""Read the rows of a trial's own files that its run in the tracking store has not received.

The trial's process writes `metrics.jsonl` and `logged.jsonl` into `trials/NNNN/`, beside the
directory of the outbox. A trial that resumes removes the rows after its checkpoint, and trains
them again. So what was delivered is known by steps (`HighWaterMarks`): a position in a file only
says where to read on. What must not live here: the state of the delivery (`outbox`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from tracking.metric_points import HighWaterMarks, MetricRow, Point, PointRow
from tracking.outbox_file import open_regular

_TRIALS = "trials"
_CURVE = "metrics.jsonl"
_LOGGED = "logged.jsonl"
_MAX_LINE_BYTES = 64 << 20
_AT_BOUNDARIES = "epoch"
# Logged every `train.layer_norms_every` steps, so they need no thinning.
_SPARSE = "grad_norm/"


# RecursionError: the JSON is nested too deeply; OSError: no regular file, or an unsteady disk
_FAULTS = ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError


class TrialLogError(ValueError):
    """A trial's files cannot be read."""


class Target(NamedTuple):
    """How much of a trial's log is to be delivered."""

    step: int
    """The last step that the trial has reported; rows after it are not delivered yet."""
    every: int
    """See `thin_rows`."""
    ended: bool
    """The trial has ended: all rows are delivered."""


class Position(NamedTuple):
    """A place in a file: behind the line `last`, whose row is that of `step`."""

    offset: int = 0
    last: bytes = b""
    step: int = 0


class LogPart(NamedTuple):
    """The next points of a trial's log."""

    points: list[Point]
    positions: tuple[Position, Position]
    """Where `logged.jsonl` and the curve are read on, once these points are delivered."""
    is_last: bool
    """No further row is there now."""
    fault: str | None = None
    """Why no further row can be read; None: there is no fault."""

    @property
    def step(self) -> int:
        """The step of the last row of the curve that was read; 0 before the first."""
        return self.positions[1].step


class TrialLog:
    """The log of one trial, in the sweep that has an outbox."""

    def __init__(self, outbox: Path, trial: int) -> None:
        self.trial = trial
        self.directory = outbox.parent / _TRIALS / f"{trial:04d}"
        self.curve = self.directory / _CURVE
        self._positions = Position(), Position()

    def read(self, target: Target, marks: HighWaterMarks, limit: int) -> LogPart:
        """Return the next points above `marks`, and raise the marks to them.

        About `limit` points at most: rows are not split.
        """
        points: list[Point] = []
        logged, curve = self._positions
        try:
            for row, after in _logged_rows(self.directory / _LOGGED, logged, target):
                if points and len(points) + len(row.metrics) > limit:
                    return LogPart(points, (logged, curve), is_last=False)
                points += marks.filter_new([row])
                logged = after
            for row, after in _curve_rows(self.curve, curve, target):
                if points and len(points) + len(row.metrics) > limit:
                    return LogPart(points, (logged, curve), is_last=False)
                points += marks.filter_new([row])
                curve = after
        except TrialLogError as error:
            return LogPart(points, (logged, curve), is_last=True, fault=str(error))
        return LogPart(points, (logged, curve), is_last=True)

    def delivered(self, part: LogPart) -> None:
        """Read on behind a part that the server acknowledged."""
        self._positions = part.positions


def thin_rows(rows: Iterable[MetricRow], every: int, *, ended: bool = False) -> Iterator[PointRow]:
    """Yield the rows that the tracking server receives of a curve.

    The first step, each epoch's end and every `every`-th step are complete; others keep
    only the layers' gradient norms. Of an ended run, the last row is complete, too.
    """
    for (row, _), is_end in _with_end(_merge_steps((row, None) for row in rows)):
        if (thin := _thin(row, every, is_end=is_end and ended)).metrics:
            yield thin


def _thin(row: PointRow, every: int, *, is_end: bool) -> PointRow:
    if row.step == 1 or row.step % every == 0 or _AT_BOUNDARIES in row.metrics or is_end:
        return row
    sparse = {key: value for key, value in row.metrics.items() if key.startswith(_SPARSE)}
    return row._replace(metrics=sparse)


_T = TypeVar("_T")


def _with_end(items: Iterable[_T]) -> Iterator[tuple[_T, bool]]:
    """Yield each item, and whether it is the last one."""
    before: list[_T] = []
    for item in items:
        if before:
            yield before.pop(), False
        before.append(item)
    if before:
        yield before.pop(), True


def _merge_steps(rows: Iterable[tuple[MetricRow, _T]]) -> Iterator[tuple[PointRow, _T]]:
    """Merge consecutive rows of the same step; each comes with what belongs to the last of them.

    There are two if fp16 skipped all windows from a checkpoint to the end of its epoch.
    """
    for step, group in groupby(rows, lambda one: one[0].step):
        metrics: dict[str, float] = {}
        for row, belongs in group:
            metrics |= row.metrics
            last = row.timestamp_ms, belongs
        yield PointRow(step, last[0], metrics), last[1]


def _curve_rows(
    path: Path, position: Position, target: Target
) -> Iterator[tuple[PointRow, Position]]:
    """Yield the rows of a curve up to its target, thinned, each with the position behind it."""
    for (row, after), is_end in _with_end(_merge_steps(_rows(path, position, "step"))):
        if row.step > target.step and not target.ended:
            return
        yield _thin(row, target.every, is_end=is_end and target.ended), after


def _logged_rows(
    path: Path, position: Position, target: Target
) -> Iterator[tuple[PointRow, Position]]:
    """Yield the rows that the user's code logged up to the target, under its own steps."""
    for row, after in _rows(path, position, "own_step"):
        if after.step > target.step and not target.ended:
            return
        yield row, after


def _rows(path: Path, position: Position, key: str) -> Iterator[tuple[PointRow, Position]]:
    """Yield the rows behind a position, or all if the file was cut or replaced since."""
    try:
        for line, offset in _lines(path, position):
            record = json.loads(line)
            metrics = {name: float(value) for name, value in record["metrics"].items()}
            row = PointRow(int(record[key]), int(record["time"]), metrics)
            yield row, Position(offset, line, int(record["step"]))
    except _FAULTS as error:
        raise TrialLogError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def _lines(path: Path, position: Position) -> Iterator[tuple[bytes, int]]:
    """Yield complete lines, each with the offset behind it; none of a missing file."""
    try:
        number = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    with os.fdopen(number, "rb") as file:
        file.seek(position.offset - len(position.last))
        is_same = file.read(len(position.last)) == position.last
        begin = position.offset if is_same else file.seek(0)
        while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
            begin += len(line)
            yield line, begin
        if len(line) == _MAX_LINE_BYTES:
            raise ValueError(f"a line has more than {_MAX_LINE_BYTES} bytes")
