"""What every run has, whoever wrote its loop: reports, a best value, and files closed with it.

What must not live here: how a run trains (`loop.py`, `own_loop.py`), or when it saves
(`checkpoint.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import numpy
from torch import Tensor

from trainable.checkpoint import CheckpointStore
from trainable.config import Mode
from trainable.errors import TaskError
from trainable.health import HealthMonitor
from trainable.manifest import Pointer
from trainable.metrics_file import History, Row

MOST_METRICS = 5_000
"""Names that a run reports or logs: several for each of a thousand classes. Each is a curve of the
tracking store, and a report with all of them is a megabyte."""
_LONGEST_NAME = 1_000
"""Characters; a tracking store takes a quarter, and shortens what is longer."""


@dataclass(frozen=True)
class RunReport:
    """What is known at the end of an epoch.

    Attributes:
        step: Optimizer steps completed.
        epoch: Epochs completed.
        metrics: The boundary's own metrics: the last row's.
        rows: Everything logged since the previous report, the boundary's own row last.
        checkpoint: The newest committed generation; the finished report's is this run's last.
        finished: This was the last epoch, or the one until which the run was opened.
        signals: What deserves a look, in sentences; see `health.py`.
    """

    step: int
    epoch: int
    metrics: dict[str, float]
    rows: list[Row]
    checkpoint: Pointer | None
    finished: bool
    signals: list[str] = field(default_factory=list)


class BaseRun(ABC):
    """A run that can be interrupted and resumed; a context manager that closes it.

    Args:
        store: Its checkpoints.
        history: Its curve.
        resumed_at: The step from which this process goes on; 0 when the run starts from the
            beginning.
        earlier: Rows written before the run was interrupted.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        history: History,
        resumed_at: int,
        earlier: Sequence[Row] = (),
    ) -> None:
        self.store = store
        self.resumed_at = resumed_at
        self._history = history
        self._watch = HealthMonitor()
        self._watch.load_history(earlier)

    @property
    @abstractmethod
    def resolved(self) -> dict[str, str]:
        """What this process decided where the configuration left it open: `device`, and where the
        loop is ours `precision`.
        """

    @abstractmethod
    def events(self) -> Iterator[RunReport]:
        """Train, and yield a report at the end of each epoch."""

    def close(self) -> None:
        """End what the loop holds and wait for what is being written. Safe to call twice."""
        with ExitStack() as last_comes_first:
            last_comes_first.callback(self._history.close)
            last_comes_first.callback(self.store.close)
            last_comes_first.callback(self._release)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _release(self) -> None:
        """End the loop's processes and generators."""

    def _report(
        self, step: int, epoch: int, metrics: dict[str, float], rows: list[Row], *, finished: bool
    ) -> RunReport:
        signals = self._watch.sentences() if rows else []
        return RunReport(step, epoch, dict(metrics), rows, self.store.pointer, finished, signals)


def one_number(value: object, given: str) -> float:
    """Return the value of a metric that a user's code gave; a tensor or an array may hold it.

    Args:
        value: What was given.
        given: Who gave it and its name, such as `run() yielded 'loss'`.

    Raises:
        TaskError: It is no number, or more than one.
    """
    single: Any = value
    try:
        if isinstance(value, numpy.generic | numpy.ndarray) or (
            isinstance(value, Tensor) and value.numel() == 1
        ):
            single = value.item()  # float would drop the imaginary part of one
        return float(single)
    except (TypeError, ValueError, OverflowError) as problem:
        raise TaskError(f"{given} as {describe(value)}; a metric is one number") from problem


def check_names(names: Collection[object], given: str) -> None:
    """Make sure that these are not too many names of metrics, and none far too long.

    Args:
        names: All that the run has, with those that are new.
        given: Who gives them, such as `run() yields`.

    Raises:
        TaskError: They are.
    """
    if len(names) > MOST_METRICS:
        raise TaskError(
            f"{given} {len(names)} metrics under names of their own; a run has at most "
            f"{MOST_METRICS} names; put what varies (a sample, a step) into a file, and keep that "
            "with log_file, or report its mean"
        )
    longest = max((len(name) for name in names if isinstance(name, str)), default=0)
    if longest > _LONGEST_NAME:
        raise TaskError(
            f"{given} a metric whose name has {longest} characters; a name has at most "
            f"{_LONGEST_NAME}; choose a short one, such as 'val/loss'"
        )


def describe(value: object) -> str:
    """Return plain data as they are written, and of anything else its type."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return repr(value)
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"


def is_better(value: float, best: float | None, mode: Mode) -> bool:
    """Whether a value is the best so far: NaN and infinity never, and of equals the earlier."""
    if not math.isfinite(value):
        return False
    return best is None or (value < best if mode == "min" else value > best)


def metrics_at_best(
    also: Sequence[str],
    now: Mapping[str, float],
    before: Mapping[str, float],
    *,
    is_best: bool,
) -> dict[str, float]:
    """Return `best/<metric>` of the metrics that count beside the deciding one.

    It is their value at the deciding one's best report, not their own best: one checkpoint has
    all of these values.

    Args:
        also: The metrics' names.
        now: The metrics of this report.
        before: The metrics of the report before, with what this returned for it.
        is_best: The deciding metric is the best so far.
    """
    names = {metric: f"best/{metric}" for metric in also}
    if is_best:
        return {name: now[metric] for metric, name in names.items()}
    return {name: before[name] for name in names.values() if name in before}
