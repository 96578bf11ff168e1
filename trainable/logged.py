"""Log: what a task or a custom loop logs itself, metrics with their sums over a window.

`Task.log` and `Context.log` call it. Values stay on their device until a row of `metrics.jsonl` is
made. Parameters and tags are written to a file at once: a process may end between a checkpoint and
the report with them, and a resumed run does not log them again. What must not live here: the rows'
file (`store/metrics_file.py`), and when rows are made (`loop.py`, `custom_loop.py`).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from trainable.base_run import MAX_METRICS, check_names, describe, one_number
from trainable.errors import TaskError
from trainable.store.metrics_file import ARTIFACTS, NOTED, Row, read_logged
from trainable.store.regular_files import LARGEST_TEXT, read_regular, replace_regular

MAX_NAMES = 200
_MAX_LENGTH = 200
_MAX_VALUES = 1_000
"""The most parameters that a run's code may log, and the most tags."""
_LONGEST_KEY = 1_000
_LONGEST_VALUE = 10_000
"""Characters kept of a parameter's or tag's value; tracking stores accept fewer."""
_RESERVED = re.compile(
    r"epoch|report|num_(skipped_steps|averaged_weights)"
    r"|train/(loss|grad_norm|lr|clip_fraction|samples_per_second|seconds|device_seconds)"
    r"|(best|gpu|grad_norm|memory|param|num_infinite)/.*"
)
_LOGS: dict[int, Log] = {}
"""The log of each task in training, by the task's id. The attributes of a task belong to the user,
so the log is not one of them."""


class Log:
    """Collects what a run's code logs: for the row of a step, or for the report of an epoch.

    Attributes:
        prefix: Put before each name: `val/` during evaluation, which is summed as a whole.
        in_epoch_hook: Whether all values count for the epoch.
        own_steps: Names for which the user's code gave a step.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._sums: Sums = {}
        self._epoch: Sums = {}  # of the steps that were taken
        self._epoch_now: Sums = {}  # and of the present one
        self._rows: list[Row] = []
        self._names: dict[tuple[str, str], tuple[Over, Reduce]] = {}
        self.prefix = ""
        self.in_epoch_hook = False
        self.directory: Path | None = None
        self.step = 0
        self.own_steps: set[str] = set()
        self._values: dict[str, dict[str, str]] = {"params": {}, "tags": {}}
        self._unreported: dict[str, dict[str, str]] = {"params": {}, "tags": {}}

    def add(
        self,
        name: str,
        value: object,
        *,
        over: Over = "step",
        reduce: Reduce = "mean",
        weight: object = None,
    ) -> None:
        """Add a value of a metric. A tensor on a device stays there."""
        self._check_process(name)
        if self.in_epoch_hook:
            over = "epoch"
        if self.prefix:
            over = "step"
        how = self._names.get((self.prefix, name))
        if how is None:
            self._check(name, over, reduce)
        elif how != (over, reduce):
            raise TaskError(
                f"log({name!r}) was called with over={over!r}, reduce={reduce!r}, and before with "
                f"over={how[0]!r}, reduce={how[1]!r}; a name has one meaning; choose another name "
                "for one of them"
            )
        if weight is not None and reduce == "sum":
            raise TaskError(
                f"log({name!r}) was given a weight and reduce='sum'; only a mean has weights; "
                "leave out one of them"
            )
        key = name if name.startswith(self.prefix) else self.prefix + name
        number = _as_number(value, f"log({name!r}) was given")
        share = None if weight is None else _as_number(weight, f"log({name!r}) was given weight=")
        add_value(self._epoch_now if over == "epoch" else self._sums, key, number, share, reduce)

    def add_row(self, name: str, value: float, step: int, timestamp_ms: int) -> None:
        """Add a value at a step that the user's code gave.

        MLflow's default is step 0. So a second value at step 0 gets the run's step.
        """
        self._check_process(name)
        if step == 0 and name in self.own_steps:
            step = self.step
        if name not in self.own_steps:
            full = len(self.own_steps) >= MAX_METRICS  # below the limit, check the name alone
            check_names({name, *(self.own_steps if full else ())}, "the plain MLflow API is given")
            self.own_steps.add(name)
        self._rows.append(Row(step, timestamp_ms, {name: value}))

    def set_values(self, kind: Literal["params", "tags"], values: Mapping[str, str]) -> None:
        """Write parameters or tags to the run's directory and add them to the next report."""
        self._check_process(kind)
        before = self._values[kind]
        num_names = len(before.keys() | values.keys())
        if num_names > _MAX_VALUES or any(len(key) > _LONGEST_KEY for key in values):
            raise TaskError(
                f"{num_names} {kind} are logged; a run has at most {_MAX_VALUES}, with names of "
                f"{_LONGEST_KEY} characters at most; write them to a file, and keep that "
                "with log_file"
            )
        values = {key: _shorten(value) for key, value in values.items()}
        self._unreported[kind].update(values)
        if any(before.get(key) != value for key, value in values.items()):
            before.update(values)
            if self.directory is not None:
                content = json.dumps(self._values).encode()
                replace_regular(self.directory / NOTED, content, durable=True)

    def load_own_steps(self) -> None:
        """Take up the names with steps of their own that the resumed run has logged.

        Call this after the rows behind the checkpoint are removed: they are logged again.
        """
        if self.directory is not None:
            logged = read_logged(self.directory)
            names = {key.removeprefix("logged/") for _, row in logged for key in row.metrics}
            self.own_steps |= names

    def load_values(self) -> None:
        """Add the parameters and tags that earlier processes logged to the next report."""
        if self.directory is None:
            return
        try:
            found = json.loads(read_regular(self.directory / NOTED, LARGEST_TEXT))
            for kind, values in self._values.items():
                values.update({str(key): str(value) for key, value in found[kind].items()})
        except FileNotFoundError:
            return
        # the file is damaged: the next value that is logged replaces it
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            return
        self._unreported = {kind: dict(values) for kind, values in self._values.items()}

    def add_file(self, path: str | Path, name: str | None) -> None:
        """Copy a file into the run's directory, from where the driver delivers it."""
        source = Path(path)
        target = self._artifact_path(source.name if name is None else name)
        if target is not None:
            shutil.copyfile(source, target)

    def add_figure(self, name: str, figure: Any) -> None:
        """Save a Matplotlib figure, or any object with `savefig`, under a name."""
        if not hasattr(figure, "savefig"):
            raise TaskError(
                f"log_figure({name!r}) was given {describe(figure)}; a figure has a method "
                "savefig, as Matplotlib's have; write it to a file, and give that to log_file"
            )
        target = self._artifact_path(name if PurePosixPath(name).suffix else f"{name}.png")
        if target is not None:
            figure.savefig(target)

    def _artifact_path(self, name: str) -> Path | None:
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
        with suppress(FileNotFoundError):
            found = target.lstat()  # writing through a link would change a file elsewhere
            if stat.S_ISLNK(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink > 1):
                target.unlink()
        return target

    def take_rows(self, reported: Collection[str]) -> list[Row]:
        """Return the rows added since the last call, and forget them."""
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

    def take_values(self) -> dict[str, dict[str, str]]:
        """Return the parameters and tags logged since the last call; leave out an empty kind."""
        taken, self._unreported = self._unreported, {"params": {}, "tags": {}}
        return {kind: some for kind, some in taken.items() if some}

    def take(self) -> Sums:
        """Return the metrics logged since the last call, except those of an epoch; forget them."""
        taken, self._sums = self._sums, {}
        return taken

    def end_step(self, *, taken: bool) -> Sums:
        """Count or forget what a step logged for its epoch; return the epoch's sums so far."""
        if taken:
            self._epoch = dict(self._epoch_now)
        else:
            self._epoch_now = dict(self._epoch)
        return self._epoch

    def take_epoch(self) -> Sums:
        """Return the sums of the epoch, and forget them."""
        taken, self._epoch, self._epoch_now = self._epoch_now, {}, {}
        return taken

    def resume_epoch(self, sums: Sums) -> None:
        """Continue with the sums that `end_step` returned before an interruption."""
        self._epoch, self._epoch_now = dict(sums), dict(sums)
        for name, (_, weights) in sums.items():
            self._names["", name] = ("epoch", "sum" if weights is None else "mean")

    def _check_process(self, name: object) -> None:
        if os.getpid() != self._process:
            raise TaskError(
                f"{name!r} was logged in a child process of the run, perhaps a data loader's; "
                "nothing is recorded from there; log in loss(), evaluate() or the loop itself"
            )

    def _check(self, name: object, over: Over, reduce: Reduce) -> None:
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
                f"log({name!r}): names that begin with val/ are for evaluate(), which puts val/ "
                "before each name; choose another name in training"
            )
        if len(self._names) >= MAX_NAMES:
            raise TaskError(
                f"log({name!r}) would be the name number {MAX_NAMES + 1}; a run logs at most "
                f"{MAX_NAMES} names; put what varies (a step, a sample) into the value"
            )
        for option, given, known in (("over", over, Over), ("reduce", reduce, Reduce)):
            if given not in get_args(known):
                raise TaskError(
                    f"log({name!r}) was given {option}={given!r}; it must be "
                    f"{' or '.join(map(repr, get_args(known)))}"
                )
        self._names[self.prefix, name] = (over, reduce)


def merge_logged(
    metrics: dict[str, float], logged: dict[str, float], source: str
) -> dict[str, float]:
    """Return reported and logged metrics as one dict."""
    if both := sorted(metrics.keys() & logged.keys()):
        raise TaskError(
            f"{both[0]!r} is logged, and {source} gives it, too; a name has one value at a step; "
            "give one of them another name"
        )
    return metrics | logged


_OPEN: dict[Path, Log] = {}
"""The logs of the runs that are open in this process, by the runs' directories."""


def run_log(directory: Path, *, writes: bool = True) -> Log:
    """Open and return the log of the run in a directory.

    Calls of MLflow's API that name no run go to the log that was opened last.
    """
    if directory not in _OPEN:
        log = _OPEN[directory] = Log()
        if not writes:
            return log
        log.directory = directory
        log.load_values()
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
    """Return the log and directory of the run that was opened last; None while none is open."""
    return (_OPEN[last], last) if (last := next(reversed(_OPEN), None)) else None


def open_log(task: Any, directory: Path, *, writes: bool = True) -> Log:
    """Send what a task logs to the run in a directory from now on."""
    log = _LOGS[id(task)] = run_log(directory, writes=writes)
    return log


@contextmanager
def collecting(task: Any) -> Iterator[Log]:
    """Collect what a task logs outside of a run."""
    log = _LOGS[id(task)] = Log()
    try:
        yield log
    finally:
        close_log(task, log)


@contextmanager
def muted(task: Any) -> Iterator[None]:
    """Forget what a task logs within the context."""
    log = _LOGS.get(id(task))
    try:
        with collecting(task):
            yield
    finally:
        if log is not None:
            _LOGS[id(task)] = log


def close_log(task: Any, log: Log) -> None:
    """Close a task's log, unless the task has opened another one since."""
    if _LOGS.get(id(task)) is log:
        del _LOGS[id(task)]


def log_of(task: Any) -> Log | None:
    """Return the log of a task; None while the task is not in training."""
    return _LOGS.get(id(task))


def is_reported_name(name: str) -> bool:
    """Whether a run reports a name itself, so that it cannot be logged."""
    return _RESERVED.fullmatch(name) is not None


def _shorten(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 1] + "…"


def _as_number(value: object, given: str) -> Number:
    """Return a number of the user's code; one on a device stays there."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            raise TaskError(f"log() was given {describe(value)}; a metric is one number")
        return value.detach().reshape(()).to(torch.float64, copy=True)
    return one_number(value, given)


Over = Literal["step", "epoch"]
Reduce = Literal["mean", "sum"]
Number = float | Tensor
Sums = dict[str, tuple[Number, Number | None]]
"""For each name the sum of its values and the sum of their weights; no weights where the sum
itself is wanted. Plain data and tensors, as a checkpoint holds them."""
FetchedSums = dict[str, tuple[float, float | None]]
"""The same as plain data."""
AnySums = TypeVar("AnySums", Sums, FetchedSums)


def add_value(sums: Sums, name: str, value: Number, weight: Number | None, reduce: Reduce) -> None:
    """Add a value to the sum of its name. Tensors that the sums hold already do not change."""
    total, weights = sums.get(name, (0.0, None))
    if reduce == "sum":
        sums[name] = total + value, None
        return
    share: Number = 1 if weight is None else weight
    weighted = value if weight is None else value * weight
    sums[name] = total + weighted, share if weights is None else weights + share


def means(taken: Iterable[Sums]) -> list[dict[str, float]]:
    """Return the mean or the sum of each name; NaN for a mean whose weights are all 0.

    Device synchronisation: once for each device with values.
    """
    return means_of(fetched(taken))


def means_of(taken: Iterable[FetchedSums]) -> list[dict[str, float]]:
    """Return the mean or the sum of each name; NaN for a mean whose weights are all 0."""
    return [{name: _mean(*pair) for name, pair in sums.items()} for sums in taken]


def fetched(taken: Iterable[Sums]) -> list[FetchedSums]:
    """Return the sums as plain data. Device synchronisation: once for each device with values."""
    taken = list(taken)
    values = _fetched(number for sums in taken for pair in sums.values() for number in pair)
    pairs = zip(values, values, strict=True)  # in the order of `pair`
    return [{name: _pair(*next(pairs)) for name in sums} for sums in taken]


def combined(of_ranks: Sequence[AnySums]) -> AnySums:
    """Return the sums of all ranks as one; a name counts where it was logged."""
    found = dict(of_ranks[0])
    for sums in of_ranks[1:]:
        for name, (total, weights) in sums.items():
            before, weights_before = found.get(name, (0.0, None))
            if weights is not None and weights_before is not None:
                weights = weights_before + weights
            found[name] = before + total, weights
    return found


def _pair(total: float | None, weights: float | None) -> tuple[float, float | None]:
    assert total is not None
    return total, weights


def _mean(total: float, weights: float | None) -> float:
    if weights is None:
        return total
    return total / weights if weights else math.nan


def _fetched(numbers: Iterable[Number | None]) -> Iterator[float | None]:
    """Yield the numbers as floats, with one transfer for each device."""
    numbers = list(numbers)
    on_device: dict[torch.device, list[Tensor]] = {}
    for number in numbers:
        if isinstance(number, Tensor):
            on_device.setdefault(number.device, []).append(number)
    there = {device: iter(torch.stack(some).tolist()) for device, some in on_device.items()}
    for number in numbers:
        yield next(there[number.device]) if isinstance(number, Tensor) else number
