"""The base of `Trainer` and `CustomLoop`: reports, the best value, and closing.

What must not live here: how a run trains (`loop.py`, `custom_loop.py`), or when it saves
(`checkpoint.py`).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy
import torch
from torch import Tensor

from trainable.checkpoint import CheckpointStore
from trainable.config import Mode
from trainable.errors import ConfigError, RankLost, TaskError
from trainable.ranks import Ranks
from trainable.store.manifest import Pointer
from trainable.store.metrics_file import History, Row
from trainable.user_code.task_import import nearest
from trainable.watch.diagnostics import GpuUse
from trainable.watch.health import HealthMonitor

_R = TypeVar("_R", bound="BaseRun")

MAX_METRICS = 5_000
"""The most metric names of a run: enough for several metrics of each of a thousand classes. Each
name is a curve on the tracking server, and a report with all of them is a megabyte."""
_MAX_NAME_LENGTH = 1_000
"""In characters. The tracking server accepts a quarter of it; longer names are sent shortened."""


@dataclass(frozen=True)
class RunReport:
    """The report after an evaluation.

    Attributes:
        step: Optimizer steps completed.
        epoch: The report's number: epochs completed, where each epoch ends with a report.
        metrics: The metrics of the last row.
        rows: All rows since the previous report; the last one is that of this report.
        checkpoint: The newest committed generation; in a finished report, the run's last one.
        finished: This is the last report, or the one at which the run pauses.
        signals: Health warnings, in sentences; see `watch/health.py`.
        out_of_patience: The run ends because its best value is too many reports old.
        lacks_model: Whether the best state has no model that can be exported; None if this process
            has saved no best state.
    """

    step: int
    epoch: int
    metrics: dict[str, float]
    rows: list[Row]
    checkpoint: Pointer | None
    finished: bool
    signals: list[str] = field(default_factory=list)
    out_of_patience: bool = False
    lacks_model: bool | None = None


def errors_reach_ranks(
    events: Callable[[_R], Iterator[RunReport]],
) -> Callable[[_R], Iterator[RunReport]]:
    """Decorate `events`: what this rank raises, the others raise, too."""

    @functools.wraps(events)
    def wrapped(self: _R) -> Iterator[RunReport]:
        try:
            yield from events(self)
        except Exception as error:
            self._ranks.close(error)
            raise

    return wrapped


class BaseRun(ABC):
    """A run that can be interrupted and resumed; as a context manager it closes itself.

    `resumed_at` is 0 for a new run. `earlier` has the rows written before the interruption.
    """

    _lacks_model: bool | None = None

    def __init__(
        self,
        *,
        store: CheckpointStore,
        history: History,
        ranks: Ranks,
        resumed_at: int,
        earlier: Sequence[Row] = (),
    ) -> None:
        self.store = store
        self.resumed_at = resumed_at
        self.ranks_before: int | None = None
        """The number of ranks that saved the state from which it resumed; None without one."""
        self.resumed_within_epoch = False
        self.stop_at = math.inf
        """The `position` at which the run saves and ends; exact also with several ranks, where
        `should_stop` is asked while a step is computed."""
        self._history = history
        self._ranks = ranks
        self._health = HealthMonitor()
        self._health.load_history(earlier)
        self._gpu = GpuUse(torch.device("cpu"))

    def watch_gpu(self, device: torch.device, share: float) -> None:
        """Measure from now on how a run with a share of a GPU uses it."""
        self._gpu, self._health.gpu_share = GpuUse(device), share

    @property
    @abstractmethod
    def resolved(self) -> dict[str, str]:
        """The `device` in use, and for a `Trainer` the `precision`."""

    def workers(self, now: int) -> dict[str, str]:
        """Return the number of ranks, and an earlier one by the step of the change; none for one.

        Within an epoch the earlier one says so: what a task collects on each rank in that epoch is
        counted otherwise.
        """
        before = self.ranks_before or now
        if before != now:
            where = ", within an epoch" if self.resumed_within_epoch else ""
            earlier = {f"workers.before_step_{self.resumed_at}": f"{before}{where}"}
            return {"workers": str(now), **earlier}
        return {} if now == 1 else {"workers": str(now)}

    @property
    @abstractmethod
    def position(self) -> int:
        """How far the run has trained, as its rows count: in steps, or a loop's reports."""

    @abstractmethod
    def events(self) -> Iterator[RunReport]:
        """Train, and yield a report after each evaluation."""

    def close(self) -> None:
        """End the loop's processes and wait for pending writes. Safe to call twice."""
        with ExitStack() as stack:  # runs in reverse order, each also after an error
            stack.callback(self._history.close)
            stack.callback(self.store.close)
            stack.callback(self._release)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.close()
        except RankLost:  # a rank that fails leaves the others, which may be saving together
            if error is None:
                raise

    @abstractmethod
    def _release(self) -> None:
        """End the loop's processes and generators."""

    def _report(
        self,
        step: int,
        number: int,
        metrics: dict[str, float],
        rows: list[Row],
        *,
        finished: bool,
        out_of_patience: bool = False,
    ) -> RunReport:
        signals = self._health.sentences() if rows else []
        return RunReport(
            step,
            number,
            dict(metrics),
            rows,
            self.store.pointer,
            finished,
            signals,
            out_of_patience,
            self._lacks_model,
        )


def num_ranks_of(saved: Mapping[str, Any] | None) -> int | None:
    """Return how many ranks saved a state; None without a state."""
    return None if saved is None else 1 + len(saved.get("ranks", []))


def one_number(value: object, given: str) -> float:
    """Return a metric of the user's code as a float; a tensor or an array may hold the number."""
    single: Any = value
    try:
        if isinstance(value, numpy.generic | numpy.ndarray) or (
            isinstance(value, Tensor) and value.numel() == 1
        ):
            single = value.item()  # float() would drop the imaginary part of a complex number
        return float(single)
    except (TypeError, ValueError, OverflowError) as problem:
        raise TaskError(f"{given} as {describe(value)}; a metric is one number") from problem


def check_names(names: Collection[object], given: str) -> None:
    """Check the number of metric names, old and new of the run together, and their lengths."""
    if len(names) > MAX_METRICS:
        raise TaskError(
            f"{given} {len(names)} metrics of different names; a run has at most "
            f"{MAX_METRICS} names; write values per sample or per step to a file and keep it "
            "with log_file, or report their mean"
        )
    longest = max((len(name) for name in names if isinstance(name, str)), default=0)
    if longest > _MAX_NAME_LENGTH:
        raise TaskError(
            f"{given} a metric whose name has {longest} characters; a name has at most "
            f"{_MAX_NAME_LENGTH}; choose a short one, such as 'val/loss'"
        )


def check_reported(metrics: Iterable[str], reported: Collection[str]) -> None:
    """Check that the metrics of a configuration are reported."""
    for metric in metrics:
        if metric not in reported:
            raise ConfigError(
                f"{metric!r} is not reported{nearest(metric, reported)}; it must be one that is "
                f"reported at the end of an epoch: {', '.join(sorted(reported))}; write one of "
                "these",
                key="metric",
            )


def describe(value: object) -> str:
    """Return the repr of plain data, and the type of any other object."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return repr(value)
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"


def is_better(value: float, best: float | None, mode: Mode) -> bool:
    """Return whether a value is the best so far; NaN, infinity and an equal value are not."""
    if not math.isfinite(value):
        return False
    return best is None or (value < best if mode == "min" else value > best)


def is_out_of_patience(patience: int | None, since_best: int) -> bool:
    """Return whether a run ends because its last reports brought no new best."""
    return patience is not None and since_best >= patience


@dataclass
class BestSoFar:
    """What a run's saved counters say of its best report."""

    best: float | None = None
    """The best value of the first metric."""
    since_best: int = 0
    """Reports since the best one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the previous report, with its `best/<metric>`."""


def update_best(progress: BestSoFar, value: float, mode: Mode) -> bool:
    """Count a report with this value of the first metric; return whether it is the best."""
    is_best = is_better(value, progress.best, mode)
    if is_best:
        progress.best = value
    progress.since_best = 0 if is_best else progress.since_best + 1
    return is_best


def best_metrics(
    metrics: Sequence[str], progress: BestSoFar, now: Mapping[str, float], *, is_best: bool
) -> dict[str, float]:
    """Return `best/<metric>` of each metric: its value at the best report; none before that.

    The first metric decides. All these values belong to one checkpoint, so that of a later metric
    need not be its best.
    """
    if progress.best is None:
        return {}
    first, *secondary = metrics
    names = {metric: f"best/{metric}" for metric in secondary}
    at_best = (
        {name: now[metric] for metric, name in names.items()}
        if is_best
        else {name: progress.metrics[name] for name in names.values() if name in progress.metrics}
    )
    return {f"best/{first}": progress.best, **at_best}
