"""Run a training loop that the user wrote as a generator function.

    def run(config, context):
        ...
        for epoch in context.remaining_epochs():
            ...
            yield {"val/loss": loss}, {"model": model.state_dict()}

Each yield is one report and one row of the curve, and counts as one step and one epoch. It may
save a checkpoint. What must not live here: how the loop trains; what it receives, and how the
ranks of a trial keep in step (`loop_context.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from trainable.base_run import (
    BaseRun,
    BestSoFar,
    RunReport,
    best_metrics,
    check_names,
    describe,
    errors_reach_ranks,
    is_out_of_patience,
    num_ranks_of,
    one_number,
    update_best,
)
from trainable.config import TrialConfig
from trainable.errors import ConfigError, NonFiniteMetric, TaskError, WithoutEffect
from trainable.logged import close_run, closed_on_error, means, merge_logged, run_log
from trainable.loop_context import (
    EXHAUSTED,
    FORMAT,
    Function,
    LoopSteps,
    Opening,
    begin,
    open_context,
    record_reads,
    saved_state,
)
from trainable.precision import device_name
from trainable.store.metrics_file import History, Row, read_rows
from trainable.store.objects import files_of
from trainable.train_state import check_state
from trainable.user_code.task_import import nearest
from trainable.warm_start import open_store
from trainable.watch import heartbeat
from trainable.watch.diagnostics import memory_in_use, memory_since_report

_READ_HERE = frozenset({"train.deterministic", "resources.workers"})
"""Searchable keys that are applied here: the loop need not read them."""


@dataclass
class _Progress(BestSoFar):
    """The counters of a run; plain data, saved in each checkpoint."""

    epoch: int = 0
    unread: list[str] = field(default_factory=list)
    """Arguments of the task that the loop had not read at its first report."""


class CustomLoop(BaseRun):
    """Run a generator function: report, save and resume what it yields.

    Args:
        function: Takes the run's `TrialConfig` and a `Context`; yields a dict of metrics, or a
            pair of metrics and state.
        config: Passed to the function. Keys are spelt as in the spec:
            `config.train.optimizer.lr`, and `config.task.width` for an argument of the task.
            Each key that the function reads is recorded.
        opening: How it is opened.
        should_stop: Called after every report; once it returns true, the run saves and ends.

    Raises:
        CheckpointError: There are checkpoints, but none can be used.
    """

    def __init__(
        self,
        function: Function,
        config: TrialConfig,
        opening: Opening,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        directory, restore, ranks = opening.directory, opening.restore, opening.ranks
        self._config = config
        self._read_config, self._reads = record_reads(config)
        self._searched = opening.searched
        self._name = config.task.name
        self._device = opening.device
        self._last = opening.until or config.budget.reports
        self._should_stop = should_stop
        files = files_of(directory, opening.checkpoints)
        store, saved = open_store(config, directory, files, restore)
        with store.closed_on_error(), closed_on_error(directory):
            self._log = run_log(directory)
            context, progress = open_context(config, opening, saved, self._log)
            self._progress = _Progress(**progress)
            self._is_new = context.restored is None and self._progress.epoch == 0
            self._log.step = self._progress.epoch + 1
            self._logged: list[Row] = []
            generator = begin(function, self._read_config, context)
            resumed_at = self._progress.epoch
            interrupted_before = (
                saved is not None and restore is None and resumed_at < config.budget.reports
            )
            saved_step = -1 if saved is None else resumed_at
            history = History(directory, files, step=saved_step, interrupted=interrupted_before)
            self._log.load_own_steps()
            self._steps = LoopSteps(generator, ranks, self._name, opening.device)
        earlier = read_rows(directory)
        self._yielded: set[str] = set()  # names of metrics
        self._warned: set[str] = set()  # metrics found missing
        self._unreported = _without_metric(earlier, config.metrics)
        super().__init__(
            store=store, history=history, ranks=ranks, resumed_at=resumed_at, earlier=earlier
        )
        store.before_commit = history.sync
        self.ranks_before = num_ranks_of(saved)

    @property
    def resolved(self) -> dict[str, str]:
        """The device that the loop received."""
        return {"device": device_name(self._device)}

    @property
    def position(self) -> int:
        """Reports made."""
        return self._progress.epoch

    @errors_reach_ranks
    def events(self) -> Iterator[RunReport]:
        """Run the loop; yield a report each time it yields the metric.

        The rows of a yield without the metric come with the next report.

        Ends after the last epoch of the budget. Ends also when the loop ends; the last report is
        then repeated with `finished` set. Ends without a further report once `should_stop` returns
        true.

        Raises:
            TaskError: The loop yielded something other than metrics, or nothing at all.
            ConfigError: No report has the metric, or a run that pauses yielded no state.
            NonFiniteMetric: The metric became NaN or infinite.
            CheckpointError: The state holds objects that cannot be saved, or could not be written.
        """
        progress, epochs = self._progress, self._last
        stopping = False
        if self._is_over():
            yield self._make_report([], finished=True)
        while not self._is_over() and not stopping:
            heartbeat.beat("report")
            yielded = self._steps.next()
            if yielded is EXHAUSTED:
                if not progress.metrics:
                    raise TaskError(
                        f"{self._name} ended without a report; it must yield a dict of metrics, "
                        "such as {'val/loss': 0.5}, at least once"
                    )
                self._check_metric()
                yield self._make_report(self._take_rows(), finished=True)
                return
            metrics, state = self._check(yielded)
            if self._is_new:
                self._is_new = False
                self._check_reads()
            value, new_best = self._record(metrics)
            stopping = self._should_stop() or self.position >= self.stop_at
            if state is not None:
                if new_best:
                    self._lacks_model = not isinstance(state.get("model"), dict)  # see `export`
                self._save(state, value, certain=new_best, final=stopping or self._is_over())
            elif progress.epoch >= epochs and epochs < self._config.budget.reports:
                raise ConfigError(
                    f"trials pause after epoch {epochs} to be resumed later, and {self._name} "
                    "yielded no state to resume from; a loop that pauses yields a pair of "
                    "metrics and state; yield one, or write asha, median or none",
                    key="early_stopping.scheduler",
                )
            elif stopping:
                self.store.wait()
            if value is not None or self._is_over():
                yield self._make_report(self._take_rows(), finished=self._is_over())

    def _save(
        self, state: dict[str, Any], value: float | None, *, certain: bool, final: bool
    ) -> None:
        """Save a yielded state if a checkpoint is due, and let the observer look at it."""
        number, store = self._progress.epoch, self.store
        snapshot = partial(self._snapshot, state)
        if store.is_observed(number):
            store.observe(number, snapshot)
        if store.is_due(step=number, epoch=number, report=number, certain=certain or final):
            store.save(snapshot, step=number, reports=number, value=value, final=final)

    def _is_over(self) -> bool:
        progress = self._progress
        return progress.epoch >= self._last or is_out_of_patience(
            self._config.patience, progress.since_best
        )

    def _release(self) -> None:
        close_run(self._history.directory)
        try:
            self._steps.close()
        finally:
            self._ranks.close()

    def _check_reads(self) -> None:
        """Refuse a searched key that the loop has not read before its first report."""
        unread = [key for key in self._searched if not self._is_read(key)]
        if unread:
            key, *others = unread
            alike = f", as {', '.join(others)}" if others else ""
            raise WithoutEffect(
                f"was searched{alike}, and {self._name} made its first report without reading "
                "it; its best value would mean nothing; read "
                f"config.{key} before the first yield{self._hint(key)}, or remove it from space; "
                "if only some values of another key need it, add a `when` condition",
                key=key,
            )
        arguments = (f"task.{name}" for name in self._config.task.arguments)
        self._progress.unread = [key for key in arguments if not self._is_read(key)]

    def _is_read(self, key: str) -> bool:
        return key in _READ_HERE or self._reads.has(key)

    def _hint(self, key: str) -> str:
        """Return a hint that names the similar key which the loop tried to read, or ""."""
        return nearest(key, self._reads.missing)

    def _unread_arguments(self) -> list[str]:
        return [
            f"{key} is given, and {self._name} does not read it{self._hint(key)}; an argument "
            f"that the loop does not read has no effect; read config.{key}, or remove it"
            for key in self._progress.unread
            if not self._reads.has(key)
        ]

    def _ranks_apart(self) -> list[str]:
        if not self._steps.trains_apart:
            return []
        return [
            f"resources.workers is {self._ranks.size}, and {self._name} makes no process group of "
            "torch; so each rank trains by itself, and only what rank 0 yields is kept; call "
            "torch.distributed.init_process_group() and give each rank its part, or write "
            "workers: 1"
        ]

    def _check(self, yielded: object) -> tuple[dict[str, float], dict[str, Any] | None]:
        metrics, state = (
            yielded
            if isinstance(yielded, tuple) and len(yielded) == 2
            else (
                yielded,
                None,
            )
        )
        if not isinstance(metrics, dict) or not metrics:
            found = "no metrics" if isinstance(metrics, dict) else describe(yielded)
            raise TaskError(
                f"{self._name} yielded {found}; it must yield a dict of metrics, or a pair of "
                "such a dict and a state dict"
            )
        if state is not None and not isinstance(state, dict):
            raise TaskError(
                f"{self._name} yielded a state of type {type(state).__name__}; it must be a dict, "
                "such as {'model': model.state_dict()}"
            )
        check_names(metrics.keys() | self._yielded, f"{self._name} yields")
        numbers = {key: self._number(key, value) for key, value in metrics.items()}
        (logged,) = means([self._log.take()])  # device synchronisation where it holds tensors
        return merge_logged(numbers, logged, self._name), state

    def _number(self, key: object, value: object) -> float:
        if not isinstance(key, str):
            raise TaskError(f"{self._name} yielded a metric named {key!r}; a name is a string")
        # device synchronisation where the loop yields a tensor on a device
        return one_number(value, f"{self._name} yielded {key!r}")

    def _record(self, metrics: dict[str, float]) -> tuple[float | None, bool]:
        """Count the report and write its row; return the metric, and whether it is the best.

        Return (None, False) for a report that lacks a metric.
        """
        progress, config = self._progress, self._config
        progress.epoch += 1
        self._yielded.update(metrics)
        lacking = [name for name in config.metrics if name not in metrics]
        value = None if lacking else metrics[config.metrics[0]]
        checked = () if lacking else config.metrics
        broken = [name for name in checked if not math.isfinite(metrics[name])]
        is_best = value is not None and update_best(
            progress, math.nan if broken else value, config.modes[0]
        )
        self._health.sample(memory_in_use(self._device))
        memory = memory_since_report(self._device) | self._gpu.read()
        numbers = dict.fromkeys(("epoch", config.budget.report_word), float(progress.epoch))
        of_row = memory | metrics | numbers
        of_row |= best_metrics(config.metrics, progress, metrics, is_best=is_best)
        row = Row(progress.epoch, int(time.time() * 1000), of_row)
        logged = self._log.take_rows(self._yielded.union(config.metrics))
        self._log.step = progress.epoch + 1
        self._history.append_logged(progress.epoch, logged)
        self._logged += logged
        self._history.append([row])
        self._unreported.append(row)
        self._health.observe(row)
        if broken:
            raise NonFiniteMetric(broken[0], progress.epoch, metrics[broken[0]])
        # The last report is made even without the metric; it repeats the metric's last value.
        kept = metrics if not lacking else progress.metrics
        progress.metrics = of_row | {n: kept[n] for n in config.metrics if n in kept}
        if lacking and progress.epoch >= self._last:
            self._check_metric()
        elif lacking and lacking[0] not in self._warned:
            self._warned.add(lacking[0])
            print(
                f"epoch {progress.epoch}: {lacking[0]!r} is not among what {self._name} yields; "
                "early stopping and the search receive no value before it is, and a run that "
                "never yields it fails at its end"
            )
        return value, is_best

    def _check_metric(self) -> None:
        """Raise an error if a run that ends has never reported one of its metrics."""
        for name in self._config.metrics:
            if name not in self._progress.metrics:
                raise ConfigError(
                    f"{name!r} is not reported{nearest(name, self._yielded)}; it must be one "
                    f"that {self._name} yields, all metrics in one report: "
                    f"{', '.join(sorted(self._yielded))}; write one of these",
                    key="metric",
                )

    def _take_rows(self) -> list[Row]:
        rows, self._unreported = [*self._logged, *self._unreported], []
        self._logged = []
        return rows

    def _snapshot(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state to be saved."""
        check_state(state)
        parts = saved_state(state, self._steps, self._ranks)
        return {"format": FORMAT, **parts, "progress": asdict(self._progress)}

    def _make_report(self, rows: list[Row], *, finished: bool) -> RunReport:
        progress = self._progress
        if finished:
            self.store.wait()
        report = self._report(
            progress.epoch,
            progress.epoch,
            progress.metrics,
            rows,
            finished=finished,
            out_of_patience=is_out_of_patience(self._config.patience, progress.since_best),
        )
        if rows:
            report.signals.extend(self._unread_arguments())
            report.signals.extend(self._ranks_apart())
        return report


def _without_metric(rows: list[Row], metrics: tuple[str, ...]) -> list[Row]:
    """Return the rows after the last report."""
    reported = [at for at, row in enumerate(rows, start=1) if row.metrics.keys() >= {*metrics}]
    return rows[reported[-1] if reported else 0 :]
