"""The second door: a loop that someone else wrote, as a generator, run like a task.

    def run(config, context):
        ...
        for epoch in context.remaining_epochs():
            ...
            yield {"val/loss": loss}, {"model": model.state_dict()}

Each yield is one report, one row of the curve and one chance to save; it counts as one step and
one epoch. What must not live here: any opinion about how the loop trains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainable import heartbeat
from trainable.base_run import (
    BaseRun,
    RunReport,
    check_names,
    describe,
    is_better,
    metrics_at_best,
    one_number,
)
from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.config_reads import recorded
from trainable.diagnostics import memory_in_use, memory_since_report
from trainable.errors import CheckpointError, ConfigError, NonFiniteMetric, TaskError
from trainable.logged import Log, close_run, closed_on_error, joined, means, run_log
from trainable.metrics_file import History, Row, read_rows
from trainable.precision import device_name
from trainable.seeding import derive_seed, set_determinism, set_seed
from trainable.step import translate_torch_errors
from trainable.storage.locate import files_of
from trainable.task_code import task_code
from trainable.task_registry import nearest
from trainable.train_state import check_state
from trainable.warm_start import with_inheritance

Yielded = dict[str, Any] | tuple[dict[str, Any], dict[str, Any] | None]
Function = Callable[[TrialConfig, "Context"], Iterator[Yielded]]

FORMAT = 1
_KEYS = {"format", "loop", "progress"}
_READ_HERE = frozenset({"train.deterministic"})
"""What can be searched and is put into effect for any loop."""
_OVER = object()
"""What stands for the end of a loop; a loop may yield None by mistake."""


@dataclass(frozen=True)
class Context:
    """What the platform tells a loop.

    Attributes:
        directory: The run's directory; files the loop writes there stay with the run.
        seed: The run's seed, for weights and the order of training. Python, NumPy and torch are
            seeded with it before the loop starts.
        epochs: How many reports are asked for; later ones are not waited for.
        device: Where to train.
        restored: The state that was yielded with the report from which the run goes on, every
            tensor on the CPU; None when it starts from the beginning.
        epoch: Reports made before; 0 when the run starts from the beginning.
        data_seed: The same for all trials of a sweep: split samples and draw validation from a
            generator of your own with this seed, so that trials are compared on the same data.
    """

    directory: Path
    seed: int
    epochs: int
    device: torch.device
    restored: dict[str, Any] | None = None
    epoch: int = 0
    data_seed: int = 0
    _log: Log = field(default_factory=Log, repr=False, compare=False)

    def log(self, name: str, value: float | torch.Tensor) -> None:
        """Log a number beside the metrics of the next report: the mean of its values until then.

        Args:
            name: Such as `train/aux_loss`; not one that the run reports itself.
            value: One number; one on a device stays there until the report.

        Raises:
            TaskError: The name or the value cannot be recorded.
        """
        self._log.add(name, value)

    def log_file(self, path: str | Path, name: str | None = None) -> None:
        """Keep a copy of a file with the run; delivered when the run ends.

        Args:
            path: The file.
            name: Its path below the run; default its own name.
        """
        self._log.add_file(path, name)

    def log_figure(self, name: str, figure: Any) -> None:
        """Keep a figure of Matplotlib's with the run, as `log_file` does.

        Args:
            name: Its path below the run; `.png` where it has no suffix.
            figure: Whatever has `savefig`.
        """
        self._log.add_figure(name, figure)

    def remaining_epochs(self) -> Iterator[int]:
        """Yield the epochs still to be trained, counted from 0.

        At the start of each, Python, NumPy and torch are seeded with a function of the run's seed
        and the epoch: a loop that draws from them shuffles and drops alike whether or not it was
        interrupted before.
        """
        for epoch in range(self.epoch, self.epochs):
            set_seed(derive_seed(self.seed, "epoch", epoch))
            yield epoch


@dataclass
class _Progress:
    """Where a run stands. Plain numbers, saved and restored as they are."""

    epoch: int = 0
    best: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """Arguments of the task that were not read before the first report."""


class CustomLoop(BaseRun):
    """Runs a generator function.

    Args:
        function: Takes the run's `TrialConfig` and a `Context`; yields a dict of metrics, or a
            pair of metrics and state.
        config: Given to the function so that keys are spelt as in the spec:
            `config.train.optimizer.lr`, and `config.task.width` for an argument of the task. What
            is read from it is noted.
        directory: The run's directory; holds `checkpoints/` and `metrics.jsonl`.
        checkpoints: Where its checkpoints lie instead, `s3://BUCKET/...`.
        searched: The keys whose values a search gave. A run that starts from the beginning fails
            at its first report where the loop has not read one of them.
        device: Where the loop shall train.
        restore: Start from this generation (possibly another run's) instead of the directory's
            newest.
        until: The report after which this process saves and ends the run, to be continued; None:
            the budget's last.
        interrupted: Asked after every report; once true, the run saves and ends there.
        wall_clock: Seconds since the Unix epoch, for the time of rows.

    Raises:
        CheckpointError: There are checkpoints, but none that can be used.
    """

    def __init__(
        self,
        function: Function,
        config: TrialConfig,
        directory: Path,
        *,
        checkpoints: str | None = None,
        searched: Collection[str] = (),
        device: torch.device,
        restore: Path | None = None,
        until: int | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._read_config, self._reads = recorded(config)
        self._searched = searched
        self._name = config.task.name
        self._device = device
        self._last = until or config.budget.epochs
        self._interrupted = interrupted
        self._wall_clock = wall_clock
        files = files_of(directory, checkpoints)
        store = CheckpointStore(
            directory,
            config.checkpoint,
            metric=config.metrics[0],
            mode=config.modes[0],
            files=files,
        )
        with store.closed_on_error(), closed_on_error(directory):
            if restore is None:
                saved = with_inheritance(directory, store.resume(), store.set_aside)
            else:
                saved = store.load(restore)
            self._progress, restored = _parse(saved)
            self._is_new = restored is None and self._progress.epoch == 0
            set_determinism(config.train.deterministic)
            set_seed(config.seed)
            context = Context(
                directory=directory,
                seed=config.seed,
                epochs=config.budget.epochs,
                device=device,
                restored=restored,
                epoch=self._progress.epoch,
                _log=run_log(directory),
                data_seed=config.seed if config.data_seed is None else config.data_seed,
            )
            self._log = context._log
            self._log.step = self._progress.epoch + 1
            self._logged: list[Row] = []
            self._generator = self._start(function, context)
            resumed_at = self._progress.epoch
            interrupted_before = (
                saved is not None and restore is None and resumed_at < config.budget.epochs
            )
            before_commit = -1 if saved is None else resumed_at
            history = History(directory, files, step=before_commit, interrupted=interrupted_before)
        earlier = read_rows(directory)
        self._yielded: set[str] = set()  # names of metrics
        self._missed: set[str] = set()
        self._unreported = _without_metric(earlier, config.metrics)
        super().__init__(store=store, history=history, resumed_at=resumed_at, earlier=earlier)

    @property
    def resolved(self) -> dict[str, str]:
        """The device that the loop was told."""
        return {"device": device_name(self._device)}

    def events(self) -> Iterator[RunReport]:
        """Run the loop, and yield a report for each of its yields that has the metric.

        The rows of those without it come with the next report.

        Ends when the budget's epochs are reported, when the loop ends by itself (the last report
        is then repeated as the finished one), or without a further report once it is interrupted.

        Raises:
            TaskError: The loop yielded something else than metrics, or nothing at all.
            ConfigError: The metric is in none of the reports, or a run that is to be continued
                yielded no state.
            NonFiniteMetric: The metric became NaN or infinite.
            CheckpointError: The state holds objects that cannot be saved, or could not be written.
        """
        progress, epochs = self._progress, self._last
        interrupted = False
        if progress.epoch >= epochs:
            yield self._make_report([], finished=True)
        while progress.epoch < epochs and not interrupted:
            heartbeat.beat("report")
            with translate_torch_errors(self._device), task_code():
                yielded = next(self._generator, _OVER)
            if yielded is _OVER:
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
            value, new_best = self._note(metrics)
            interrupted = self._interrupted()
            if state is not None:
                self.store.maybe_save(
                    lambda state=state: self._snapshot(state),  # type: ignore[misc]
                    step=progress.epoch,
                    epoch=progress.epoch,
                    end_of_epoch=True,
                    value=value,
                    new_best=new_best,
                    final=interrupted or progress.epoch >= epochs,
                    before_commit=self._history.sync,
                )
            elif progress.epoch >= epochs and epochs < self._config.budget.epochs:
                raise ConfigError(
                    f"trials pause after epoch {epochs} to be continued later, and {self._name} "
                    "yielded no state to continue from; a loop that pauses yields a pair of "
                    "metrics and state; yield one, or write asha, median or none",
                    key="early_stopping.scheduler",
                )
            elif interrupted:
                self.store.wait()
            if value is not None or progress.epoch >= epochs:
                yield self._make_report(self._take_rows(), finished=progress.epoch >= epochs)

    def _release(self) -> None:
        close_run(self._history.directory)
        self._generator.close()  # its `finally` blocks run

    def _start(self, function: Function, context: Context) -> Generator[Any, None, None]:
        started = function(self._read_config, context)
        if not isinstance(started, Generator):
            raise TaskError(
                f"{self._name} returned an object of type {type(started).__name__}; it must be a "
                "generator function: yield a dict of metrics after each epoch"
            )
        return started

    def _check_reads(self) -> None:
        """Refuse a search of what the loop does not read, once it has made its first report."""
        unread = [key for key in self._searched if not self._is_read(key)]
        if unread:
            key = unread[0]
            one = key if len(unread) == 1 else f"{', '.join(unread)} each"
            raise ConfigError(
                f"{one} was searched, and {self._name} made its first report without reading "
                "it; whatever is found as its best value would mean nothing; read "
                f"config.{key} before the first yield{self._needs(key)}, or remove it from space; "
                "where it counts for some values of another key only, say so with `when`",
                key=key,
            )
        arguments = (f"task.{name}" for name in self._config.task.arguments)
        self._progress.unread = [key for key in arguments if not self._is_read(key)]

    def _is_read(self, key: str) -> bool:
        return key in _READ_HERE or self._reads.has(key)

    def _needs(self, key: str) -> str:
        """What the loop asked for instead, where it looks like a mistake in writing."""
        return nearest(key, self._reads.missing)

    def _unread_arguments(self) -> list[str]:
        return [
            f"{key} is given, and {self._name} does not read it{self._needs(key)}; an argument "
            f"that nobody reads changes nothing; read config.{key}, or remove it"
            for key in self._progress.unread
            if not self._reads.has(key)
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
        return joined(numbers, logged, self._name), state

    def _number(self, key: object, value: object) -> float:
        if not isinstance(key, str):
            raise TaskError(f"{self._name} yielded a metric named {key!r}; a name is a string")
        # device synchronisation where it is a tensor on one: the loop chose to yield that
        return one_number(value, f"{self._name} yielded {key!r}")

    def _note(self, metrics: dict[str, float]) -> tuple[float | None, bool]:
        """Count the report and write its row; return the metric, and if it is best.

        Of a report without the metric, or one of several, there is neither: nobody decides by it.
        """
        progress, config = self._progress, self._config
        progress.epoch += 1
        metric, *also = config.metrics
        self._yielded.update(metrics)
        lacking = [name for name in config.metrics if name not in metrics]
        value = None if lacking else metrics[metric]
        checked = () if lacking else config.metrics
        broken = [name for name in checked if not math.isfinite(metrics[name])]
        is_best = (
            value is not None and not broken and is_better(value, progress.best, config.modes[0])
        )
        if is_best:
            progress.best = value
        self._watch.sample(memory_in_use(self._device))
        memory = memory_since_report(self._device)
        best = metrics_at_best(also, metrics, progress.metrics, is_best=is_best)
        of_row = memory | metrics | {"epoch": float(progress.epoch)}
        if progress.best is not None:
            of_row |= {f"best/{metric}": progress.best, **best}
        row = Row(progress.epoch, int(self._wall_clock() * 1000), of_row)
        logged = self._log.take_rows(self._yielded.union(config.metrics))
        self._log.step = progress.epoch + 1
        self._history.append_logged(progress.epoch, logged)
        self._logged += logged
        self._history.append([row])
        self._unreported.append(row)
        self._watch.see(row)
        if broken:
            raise NonFiniteMetric(broken[0], progress.epoch, metrics[broken[0]])
        # The last report of a run is one in any case; it then says what the metric was last.
        kept = metrics if not lacking else progress.metrics
        progress.metrics = of_row | {n: kept[n] for n in config.metrics if n in kept}
        if lacking and progress.epoch >= self._last:
            self._check_metric()
        elif lacking and lacking[0] not in self._missed:
            self._missed.add(lacking[0])
            print(
                f"epoch {progress.epoch}: {lacking[0]!r} is not among what {self._name} yields; "
                "nothing is decided until it is, and a run that never yields it fails at its end"
            )
        return value, is_best

    def _check_metric(self) -> None:
        """Refuse the end of a run that has never reported its metric."""
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
        """Make the state to be saved."""
        check_state(state)
        return {"format": FORMAT, "loop": state, "progress": asdict(self._progress)}

    def _make_report(self, rows: list[Row], *, finished: bool) -> RunReport:
        progress = self._progress
        if finished:
            self.store.wait()
        report = self._report(
            progress.epoch, progress.epoch, progress.metrics, rows, finished=finished
        )
        if rows:
            report.signals.extend(self._unread_arguments())
        return report


def _without_metric(rows: list[Row], metrics: tuple[str, ...]) -> list[Row]:
    """Return the rows after the last one that was a report."""
    reported = [at for at, row in enumerate(rows, start=1) if row.metrics.keys() >= {*metrics}]
    return rows[reported[-1] if reported else 0 :]


def _parse(saved: dict[str, Any] | None) -> tuple[_Progress, dict[str, Any] | None]:
    if saved is None:
        return _Progress(), None
    if set(saved) != _KEYS or saved["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint holds the keys {sorted(saved)} and is not one of a loop of one's own "
            f"in format {FORMAT}; continue with the task and the version that wrote it"
        )
    return _Progress(**saved["progress"]), saved["loop"]
