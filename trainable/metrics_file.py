"""The curve of one run on disk: `metrics.jsonl`, each logged step once, and `resumed.json`.

One line is one row: `{"step": 12, "time": 1700000000000, "metrics": {"train/loss": 0.5}}`. Rows
are made durable before the checkpoint that covers them, and cut back to the checkpoint when a run
resumes, so file and checkpoint never disagree. `resumed.json`, which only an interrupted run has,
lists the steps after which it went on. `logged.jsonl` has what a user's code logged under steps of
its own: a line is a row of the run's step at which it was logged, with `own_step` beside. What
must not live here: torch, or any opinion about which metrics exist.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from redaction.secrets import redact
from trainable.errors import StorageError
from trainable.storage.generations import RunFiles, remedy
from trainable.storage.local import LocalFiles
from trainable.storage.regular_files import (
    LARGEST_CURVE,
    LARGEST_TEXT,
    IrregularFile,
    open_regular,
    read_regular,
)

FILE_NAME = "metrics.jsonl"
LOGGED = "logged.jsonl"
ARTIFACTS = "artifacts"
"""The directory of a run in which files lie that its code logged."""
RESUMED = "resumed.json"

_LONGEST_LINE = 64 << 20
"""Bytes; a hundred thousand metrics of a hundred characters are a fifth of it."""


class CurveDamaged(ValueError):
    """A run's curve on disk, or where it was interrupted, cannot be read."""


class Row(NamedTuple):
    """What was logged at one step.

    Attributes:
        step: Optimizer steps completed.
        timestamp_ms: When the step was completed, in milliseconds since the Unix epoch.
        metrics: Values by metric name.
    """

    step: int
    timestamp_ms: int
    metrics: dict[str, float]


def read_rows(directory: Path) -> list[Row]:
    """Read the rows of the run in `directory`, oldest first; none when nothing was logged.

    A last line without its end (the writer was killed) is left out. Lines of the same step are one
    row: that happens when all windows between a checkpoint and the end of its epoch were skipped
    by the fp16 scaler.

    Raises:
        CurveDamaged: A line is no row.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in _complete_lines(path):
        row = _parse(line, path)
        if rows and rows[-1].step == row.step:
            rows[-1] = Row(row.step, row.timestamp_ms, rows[-1].metrics | row.metrics)
        else:
            rows.append(row)
    return rows


def read_logged(directory: Path) -> list[tuple[int, Row]]:
    """Read what a user's code logged under steps of its own, in the order in which it did.

    Returns:
        The run's step at which each was logged, and a row of its own step.

    Raises:
        CurveDamaged: A line is no row.
    """
    path = directory / LOGGED
    if not path.exists():
        return []
    found = []
    for line in _complete_lines(path):
        at = _parse(line, path)
        found.append((at.step, at._replace(step=json.loads(line).get("own_step", at.step))))
    return found


def logged_files(directory: Path) -> list[tuple[Path, str]]:
    """Return the files that a run's code logged, each with its path below the run.

    None is a symbolic link: what is tracked is a copy of a file, and a link may lead to any.
    """
    root = directory / ARTIFACTS
    if root.is_symlink() or not root.is_dir():
        return []
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return [(path, path.relative_to(root).as_posix()) for path in files]


def read_resumptions(directory: Path) -> list[int]:
    """Read after which steps the run in `directory` was interrupted and went on, ascending.

    Raises:
        CurveDamaged: The file is no list of steps.
    """
    path = directory / RESUMED
    try:
        steps: list[int] = json.loads(read_regular(path, LARGEST_TEXT))
        return [int(step) for step in steps]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except IrregularFile as error:
        raise CurveDamaged(str(error)) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise CurveDamaged(
            f"{path} is damaged ({type(error).__name__}: {error}); it is the list of steps after "
            "which the run went on, for its pictures; restore it from a backup, or remove it"
        ) from error


class History:
    """Goes on with a run's file, from the step at which the run goes on.

    Every row after that step, and a torn last line, are dropped by writing the file anew: whoever
    wrote it before, and does not know yet that it has been replaced, appends to a file that is
    no longer there.

    Args:
        directory: The run's directory.
        files: Opened for writing: replaces the file only while no other process has taken over.
        step: The last step whose row stays; -1 keeps none. Step 0 has a row where fp16 skipped the
            whole first epoch.
        interrupted: Remember for `read_resumptions` that the run goes on there.

    Raises:
        Fenced: Another process has taken over.
        StorageError: The curve cannot be written.
        CurveDamaged: A line that would stay is no row.
    """

    def __init__(
        self, directory: Path, files: RunFiles, *, step: int, interrupted: bool = False
    ) -> None:
        self.directory = directory
        self._path = path = directory / FILE_NAME
        self._files = files
        with self._writing():
            files.replace(path, _up_to(path, step))
            before = read_resumptions(directory)
            # What lay beyond the step no longer counts: the curve is another one from there on.
            now = [earlier for earlier in before if earlier < step] + [step] * interrupted
            if now != before:
                files.replace(directory / RESUMED, json.dumps(now).encode())
            self._file = _appending(path)
            self._logged_path = logged = directory / LOGGED
            if logged.exists():
                files.replace(logged, _up_to(logged, step))
            self._logged_file: BinaryIO | None = None

    def append(self, rows: Iterable[Row]) -> None:
        """Append rows and hand them to the operating system, so that other processes see them.

        Raises:
            Fenced: Another process has taken over, and the storage says so.
            StorageError: They cannot be written.
        """
        with self._writing():
            self._file.write(b"".join(map(_format, rows)))
            self._file.flush()

    def append_logged(self, step: int, rows: Sequence[Row]) -> None:
        """Append rows of other steps than the run's, logged up to this step of the run.

        Raises:
            Fenced: Another process has taken over, and the storage says so.
            StorageError: They cannot be written.
        """
        if not rows:
            return
        with self._writing():
            if self._logged_file is None:
                self._logged_file = _appending(self._logged_path)
            lines = (
                json.dumps(
                    {
                        "step": step,
                        "own_step": row.step,
                        "time": row.timestamp_ms,
                        "metrics": row.metrics,
                    }
                )
                for row in rows
            )
            self._logged_file.write("".join(f"{line}\n" for line in lines).encode())
            self._logged_file.flush()

    def sync(self) -> None:
        """Return once everything appended survives a power loss."""
        with self._writing():
            for file in filter(None, (self._file, self._logged_file)):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """Make everything durable and close the file."""
        if not self._file.closed:
            with self._writing():
                try:
                    self.sync()
                finally:
                    self._file.close()
                    if self._logged_file is not None:
                        self._logged_file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._files.translate_fenced():
                yield
        except OSError as problem:
            raise StorageError(
                f"the curve {self._path} could not be written: {redact(str(problem))}; earlier "
                f"checkpoints are untouched; {remedy(problem, LocalFiles.remedy)}, then resume"
            ) from problem


def _up_to(path: Path, step: int) -> bytes:
    keep: list[bytes] = []
    if step >= 0 and path.exists():
        for line in _complete_lines(path):
            if _parse(line, path).step > step:
                break
            keep.append(line)
    return b"".join(keep)


def _format(row: Row) -> bytes:
    record = {"step": row.step, "time": row.timestamp_ms, "metrics": row.metrics}
    return json.dumps(record).encode() + b"\n"


def _parse(line: bytes, path: Path) -> Row:
    try:
        record = json.loads(line)
        return Row(record["step"], record["time"], record["metrics"])
    # what is nested without end is no row either
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CurveDamaged(
            f"{path} is damaged ({type(error).__name__}: {error}); a curve is one JSON object a "
            "line; restore the file from a backup, or cut it before the damaged line"
        ) from error


def _appending(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.fdopen(open_regular(path, flags, limit=LARGEST_CURVE), "ab")


def _complete_lines(path: Path) -> Iterator[bytes]:
    try:
        number = open_regular(path, limit=LARGEST_CURVE)
    except IrregularFile as error:
        raise CurveDamaged(str(error)) from None
    with os.fdopen(number, "rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if line.endswith(b"\n"):
                yield line
            elif len(line) == _LONGEST_LINE:
                raise CurveDamaged(
                    f"{path} has a line of more than {_LONGEST_LINE} bytes; a curve is one JSON "
                    "object a line; restore the file from a backup, or cut it before that line"
                )
