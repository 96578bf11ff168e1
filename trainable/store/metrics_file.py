"""The metrics of one run on disk: `metrics.jsonl`, `resumed.json` and `logged.jsonl`.

Rows are synced before the checkpoint of their step is committed, and a resumed run removes the
rows after its checkpoint: file and checkpoint never disagree. A line of `metrics.jsonl` is
`{"step": 12, "time": 1700000000000, "metrics": {"train/loss": 0.5}}`; `logged.jsonl` has the rows
of the user's code with its own steps, `own_step`. What must not live here: torch, or which metrics
exist.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from redaction.secrets import redact
from trainable.errors import StorageError
from trainable.store.generations import MISSING, RunFiles, remedy
from trainable.store.local import LocalFiles
from trainable.store.regular_files import (
    LARGEST_CURVE,
    LARGEST_TEXT,
    IrregularFile,
    open_regular,
    read_regular,
)

FILE_NAME = "metrics.jsonl"
LOGGED = "logged.jsonl"
ARTIFACTS = "artifacts"
"""The subdirectory of a run for the files that the user's code logs."""
RESUMED = "resumed.json"
NOTED = "noted.json"
"""The file in a run's directory with the parameters and tags that its code logged."""

_CURVE_RULE = (
    "a curve is one JSON object a line; restore the file from a backup, or cut it before the "
    "damaged line"
)
_MAX_LINE_BYTES = 64 << 20
"""A hundred thousand metrics of a hundred characters take a fifth of it."""


class CurveDamaged(ValueError):
    """A run's metrics file, or its list of resumptions, cannot be read."""


class Row(NamedTuple):
    """The metrics of one step.

    Attributes:
        step: Optimizer steps completed.
        timestamp_ms: Time of completion, in milliseconds since the Unix epoch.
        metrics: Values by metric name.
    """

    step: int
    timestamp_ms: int
    metrics: dict[str, float]


def read_rows(directory: Path) -> list[Row]:
    """Read the rows of the run in `directory`, oldest first; empty if the run has none.

    An incomplete last line (its writer was killed) is ignored. Lines of the same step become one
    row: there are two if fp16 skipped all windows from a checkpoint to the end of its epoch.

    Raises:
        CurveDamaged: A line is not a row.
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


def read_row_at(directory: Path, step: int) -> Row | None:
    """Return the row of one step; None if there is none. Other rows are not parsed."""
    path = directory / FILE_NAME
    try:
        text = read_regular(path, LARGEST_CURVE)
    except FileNotFoundError:
        return None
    begin, found, at = b'{"step": %d,' % step, None, 0
    while (at := text.find(begin, at)) >= 0:
        end = text.find(b"\n", at)
        if end < 0:
            break  # its writer was killed
        if at == 0 or text[at - 1 : at] == b"\n":
            row = _parse(text[at:end], path)
            found = row if found is None else row._replace(metrics=found.metrics | row.metrics)
        at = end
    return found


def read_logged(directory: Path) -> list[tuple[int, Row]]:
    """Read the rows of the user's code with its own steps, and the run's step at each time."""
    path = directory / LOGGED
    if not path.exists():
        return []
    return [
        (_parse(line, path).step, _parse(line, path, step="own_step"))
        for line in _complete_lines(path)
    ]


def logged_files(directory: Path) -> list[tuple[Path, str]]:
    """Return the files that the user's code logged, each with its path among the artifacts.

    Symbolic links are left out: a link may point to any file, and would upload it.
    """
    root = directory / ARTIFACTS
    if root.is_symlink() or not root.is_dir():
        return []
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return [(path, path.relative_to(root).as_posix()) for path in files]


def read_resumptions(directory: Path) -> list[int]:
    """Read the steps from which the run in `directory` resumed after interruptions, ascending."""
    path = directory / RESUMED
    rule = (
        "it is the list of steps from which the run resumed, for its figures; restore it from a "
        "backup, or remove it"
    )
    with suppress(*MISSING), damage_named(path, rule):
        return [int(step) for step in json.loads(read_regular(path, LARGEST_TEXT))]
    return []


@contextlib.contextmanager
def damage_named(path: Path, rule: str) -> Iterator[None]:
    """Raise `CurveDamaged` for a file of another form; `rule` says which one it has."""
    try:
        yield
    except MISSING:
        raise
    except OSError as error:  # not a regular file, for example
        raise CurveDamaged(str(error)) from None
    # RecursionError: the JSON is nested too deeply
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CurveDamaged(
            f"{path} is damaged ({type(error).__name__}: {error}); {rule}"
        ) from error


class History:
    """Write a run's metrics, continuing after `step`, from which the run resumes; -1 keeps no row.

    Step 0 has a row if fp16 skipped the whole first epoch. `interrupted` records this resumption.
    The file is replaced by one without later rows or a torn last line. A replaced writer that is
    still alive then appends to the old file, which has no name any more. Writing raises
    `WriterReplaced` if another process writes this run now, else `StorageError`.
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
            # Resumptions after this step belong to the dropped rows.
            now = [earlier for earlier in before if earlier < step] + [step] * interrupted
            if now != before:
                files.replace(directory / RESUMED, json.dumps(now).encode())
            self._file = _open_for_append(path)
            self._logged_path = logged = directory / LOGGED
            if logged.exists():
                files.replace(logged, _up_to(logged, step))
            self._logged_file: BinaryIO | None = None

    def append(self, rows: Iterable[Row]) -> None:
        """Append rows and flush them, so that other processes can read them."""
        with self._writing():
            self._file.write(b"".join(map(format_row, rows)))
            self._file.flush()

    def append_logged(self, step: int, rows: Sequence[Row]) -> None:
        """Append rows that the user's code logged under its own steps, at the run's `step`."""
        if not rows:
            return
        with self._writing():
            if self._logged_file is None:
                self._logged_file = _open_for_append(self._logged_path)
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
        """Return once all appended rows would survive a power loss."""
        with self._writing():
            for file in filter(None, (self._file, self._logged_file)):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """Sync and close the files."""
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


def drop_later_rows(directory: Path, step: int) -> None:
    """Remove the rows after a step from the curve of a run that no process writes."""
    for name in (FILE_NAME, LOGGED):
        path = directory / name
        if path.exists():
            path.write_bytes(_up_to(path, step))


def format_row(row: Row) -> bytes:
    """Return a row as a line of the file."""
    record = {"step": row.step, "time": row.timestamp_ms, "metrics": row.metrics}
    return json.dumps(record).encode() + b"\n"


def _parse(line: bytes, path: Path, step: str = "step") -> Row:
    with damage_named(path, _CURVE_RULE):
        record = json.loads(line)
        return Row(record[step], record["time"], record["metrics"])


def _open_for_append(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.fdopen(open_regular(path, flags, limit=LARGEST_CURVE), "ab")


def _complete_lines(path: Path) -> Iterator[bytes]:
    try:
        number = open_regular(path, limit=LARGEST_CURVE)
    except IrregularFile as error:
        raise CurveDamaged(str(error)) from None
    with os.fdopen(number, "rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            if line.endswith(b"\n"):
                yield line
            elif len(line) == _MAX_LINE_BYTES:
                raise CurveDamaged(
                    f"{path} has a line of more than {_MAX_LINE_BYTES} bytes; a curve is one JSON "
                    "object a line; restore the file from a backup, or cut it before that line"
                )
