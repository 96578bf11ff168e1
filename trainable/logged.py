"""Numbers that a task or a loop logs beside what the platform reports: `Task.log`, `Context.log`.

They become columns of the run's rows, so they are saved, cut back and delivered as these are.
Parameters and tags are kept in a file from when they are logged: a process may end between a
checkpoint and the report that carries them, and what the checkpoint has is not logged again.
Values stay on their device until the rows are made. What must not live here: rows (`history`), and
when they are made (`loop`, `own_loop`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch import Tensor

from trainable.base_run import MOST_METRICS, check_names, describe, one_number
from trainable.errors import TaskError
from trainable.metrics_file import ARTIFACTS, Row, read_logged
from trainable.storage.durable import replace_file
from trainable.storage.regular_files import LARGEST_TEXT, read_regular

NOTED = "noted.json"
"""In a run's directory: the parameters and tags that its code logged, where it logged any."""
MAX_NAMES = 200
_MAX_LENGTH = 200
_MAX_NOTES = 1_000
"""Parameters, and as many tags, that a run's code logs."""
_LONGEST_KEY = 1_000
_LONGEST_NOTE = 10_000
"""Characters of one's value; of what is longer the beginning is kept. A tracking store takes
fewer."""
_RESERVED = re.compile(
    r"epoch|num_skipped_steps|train/(loss|grad_norm|lr|clip_fraction|samples_per_second|seconds"
    r"|device_seconds)|(best|grad_norm|memory|param|num_infinite)/.*"
)
Sums = dict[str, tuple[float | Tensor, int]]
"""Of each name, the sum of its values and their number."""

_LOGS: dict[int, Log] = {}
"""The log of each task that is being trained, by the task's id: nothing is kept on a task, whose
attributes are the user's."""


class Log:
    """Gathers what is logged until it is taken. Several values of a name become their mean.

    Attributes:
        prefix: Put before each name: `val/` while the model is evaluated.
        directory: The run's; None where there is none.
        step: The run's, which is being made.
        own_steps: Names that have a value under a step of the user's own.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._sums: Sums = {}
        self._rows: list[Row] = []
        self._names: set[tuple[str, str]] = set()
        self.prefix = ""
        self.directory: Path | None = None
        self.step = 0
        self.own_steps: set[str] = set()
        self._noted: dict[str, dict[str, str]] = {"params": {}, "tags": {}}
        self._not_taken: dict[str, dict[str, str]] = {"params": {}, "tags": {}}

    def add(self, name: str, value: object) -> None:
        """Add a value; one on a device stays there.

        Raises:
            TaskError: The name cannot be used, or the value is not one number.
        """
        self._check_process(name)
        if (self.prefix, name) not in self._names:
            self._check(name)
        key = name if name.startswith(self.prefix) else self.prefix + name
        number: float | Tensor
        if isinstance(value, Tensor) and value.device.type != "cpu" and _is_real_number(value):
            number = value.detach().reshape(()).to(torch.float64, copy=True)
        else:
            number = one_number(value, f"log({name!r}) was given")
        total, count = self._sums.get(key, (0.0, 0))
        self._sums[key] = (total + number, count + 1)

    def add_row(self, name: str, value: float, step: int, timestamp_ms: int) -> None:
        """Add a value under a step of the user's own. A second one at step 0 has no step: it gets
        the run's.
        """
        self._check_process(name)
        if step == 0 and name in self.own_steps:
            step = self.step
        if name not in self.own_steps:
            full = len(self.own_steps) >= MOST_METRICS  # else only the name may be refused
            check_names({name, *(self.own_steps if full else ())}, "the plain MLflow API is given")
            self.own_steps.add(name)
        self._rows.append(Row(step, timestamp_ms, {name: value}))

    def note(self, kind: Literal["params", "tags"], values: Mapping[str, str]) -> None:
        """Keep parameters or tags, for the next report and in the run's directory.

        Raises:
            TaskError: They are too many.
            OSError: They cannot be written there.
        """
        self._check_process(kind)
        noted = self._noted[kind]
        num_names = len(noted.keys() | values.keys())
        if num_names > _MAX_NOTES or any(len(key) > _LONGEST_KEY for key in values):
            raise TaskError(
                f"{num_names} {kind} are logged; a run has at most {_MAX_NOTES}, with names of "
                f"{_LONGEST_KEY} characters at most; write them to a file, and keep that "
                "with log_file"
            )
        values = {key: _beginning(value) for key, value in values.items()}
        self._not_taken[kind].update(values)
        if any(noted.get(key) != value for key, value in values.items()):
            noted.update(values)
            if self.directory is not None:
                replace_file(self.directory / NOTED, json.dumps(self._noted))

    def recall_notes(self) -> None:
        """Have the next report carry all that earlier processes of the run kept."""
        if self.directory is None:
            return
        try:
            found = json.loads(read_regular(self.directory / NOTED, LARGEST_TEXT))
            for kind, kept in self._noted.items():
                kept.update({str(key): str(value) for key, value in found[kind].items()})
        except FileNotFoundError:
            return
        # damaged: what is logged again is kept again
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            return
        self._not_taken = {kind: dict(kept) for kind, kept in self._noted.items()}

    def add_file(self, path: str | Path, name: str | None) -> None:
        """Keep a copy of a file in the run's directory, from where it is delivered.

        Raises:
            TaskError: The name leaves the run.
            OSError: The file cannot be read, or not be copied.
        """
        source = Path(path)
        target = self._place(source.name if name is None else name)
        if target is not None:
            shutil.copyfile(source, target)

    def add_figure(self, name: str, figure: Any) -> None:
        """Keep a figure of Matplotlib's, or whatever has `savefig`, as the file of that name."""
        if not hasattr(figure, "savefig"):
            raise TaskError(
                f"log_figure({name!r}) was given {describe(figure)}; a figure has a method "
                "savefig, as Matplotlib's have; write it to a file, and give that to log_file"
            )
        target = self._place(name if PurePosixPath(name).suffix else f"{name}.png")
        if target is not None:
            figure.savefig(target)

    def _place(self, name: str) -> Path | None:
        path = PurePosixPath(name)
        if not path.name or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise TaskError(
                f"a file was logged as {name!r}; it must be a relative path that stays below the "
                "run; write something like 'samples/epoch-3.png'"
            )
        if self.directory is None:
            return None
        target = self.directory / ARTIFACTS / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():  # written through, it would be a file elsewhere
            target.unlink()
        return target

    def take_rows(self, reported: Collection[str]) -> list[Row]:
        """Return the rows that were added since, and begin anew.

        Args:
            reported: Names that the run reports: `logged/` is put before such a one, whose steps
                are others.
        """
        taken, self._rows = self._rows, []
        return [
            row._replace(
                metrics={
                    f"logged/{name}"
                    if name in reported or _RESERVED.fullmatch(name)
                    else name: value
                    for name, value in row.metrics.items()
                }
            )
            for row in taken
        ]

    def take_notes(self) -> dict[str, dict[str, str]]:
        """Return the parameters and tags that were logged since; nothing where none were."""
        taken, self._not_taken = self._not_taken, {"params": {}, "tags": {}}
        return {kind: some for kind, some in taken.items() if some}

    def take(self) -> Sums:
        """Return what was logged since, and begin anew."""
        taken, self._sums = self._sums, {}
        return taken

    def _check_process(self, name: object) -> None:
        if os.getpid() != self._process:
            raise TaskError(
                f"{name!r} was logged in a process that the run has started, a loader's perhaps, "
                "from which nothing is recorded; log in loss(), evaluate() or the loop itself"
            )

    def _check(self, name: object) -> None:
        if not isinstance(name, str) or not name.strip() or len(name) > _MAX_LENGTH:
            raise TaskError(
                f"log() was given the name {name!r}; it must be a text of 1 to {_MAX_LENGTH} "
                "characters, such as 'train/aux_loss'"
            )
        if _RESERVED.fullmatch(name):
            raise TaskError(
                f"log({name!r}): a name that the run itself reports cannot be logged; choose "
                f"another one, such as 'my/{name.rpartition('/')[2]}'"
            )
        if name.startswith("val/") and not self.prefix:
            raise TaskError(
                f"log({name!r}): what begins with val/ is logged in evaluate(), where that is put "
                "before each name; choose another name in training"
            )
        if len(self._names) >= MAX_NAMES:
            raise TaskError(
                f"log({name!r}) would be the name number {MAX_NAMES + 1}; a run logs at most "
                f"{MAX_NAMES} names; put what varies (a step, a sample) into the value"
            )
        self._names.add((self.prefix, name))


def means(taken: Iterable[Sums]) -> list[dict[str, float]]:
    """Return the mean of each name; device synchronisation: one for each device, where any value
    is on one.
    """
    taken = list(taken)
    waiting: dict[torch.device, list[Tensor]] = {}
    for sums in taken:
        for total, _ in sums.values():
            if isinstance(total, Tensor):
                waiting.setdefault(total.device, []).append(total)
    fetched = {device: iter(torch.stack(some).tolist()) for device, some in waiting.items()}
    return [
        {
            name: (next(fetched[total.device]) if isinstance(total, Tensor) else total) / count
            for name, (total, count) in sums.items()
        }
        for sums in taken
    ]


def joined(metrics: dict[str, float], logged: dict[str, float], given: str) -> dict[str, float]:
    """Return metrics with what was logged beside them.

    Raises:
        TaskError: Both have a value of one name.
    """
    if both := sorted(metrics.keys() & logged.keys()):
        raise TaskError(
            f"{both[0]!r} is logged, and {given} gives it, too; a name has one value at a step; "
            "give one of them another name"
        )
    return metrics | logged


_OPEN: dict[Path, Log] = {}
"""The logs of the runs that are open in this process, by the runs' directories."""


def run_log(directory: Path) -> Log:
    """Return the log of the run in a directory, open from now on: what is logged without a task
    or a context goes to the run that was opened last.
    """
    if directory not in _OPEN:
        log = _OPEN[directory] = Log()
        log.directory = directory
        log.own_steps.update(key for _, row in read_logged(directory) for key in row.metrics)
        log.recall_notes()
    return _OPEN[directory]


def close_run(directory: Path) -> None:
    """Close the log of a run."""
    _OPEN.pop(directory, None)


@contextmanager
def closed_on_error(directory: Path) -> Iterator[None]:
    """Close the log of a run if the run cannot be opened."""
    try:
        yield
    except BaseException:
        close_run(directory)
        raise


def current_run() -> tuple[Log, Path] | None:
    """Return the log and the directory of the run that was opened last; None while none is."""
    return (_OPEN[last], last) if (last := next(reversed(_OPEN), None)) else None


def open_log(task: Any, directory: Path) -> Log:
    """Let what a task logs be gathered from now on, for the run in a directory."""
    log = _LOGS[id(task)] = run_log(directory)
    return log


def close_log(task: Any, log: Log) -> None:
    """No longer gather it, unless another run of the task does."""
    if _LOGS.get(id(task)) is log:
        del _LOGS[id(task)]


def log_of(task: Any) -> Log | None:
    """Return the log of a task; None while it is not trained."""
    return _LOGS.get(id(task))


def _beginning(value: str) -> str:
    return value if len(value) <= _LONGEST_NOTE else value[: _LONGEST_NOTE - 1] + "…"


def _is_real_number(value: Tensor) -> bool:
    if value.numel() != 1 or value.is_complex() or value.is_meta:
        raise TaskError(f"log() was given {describe(value)}; a metric is one number")
    return True
