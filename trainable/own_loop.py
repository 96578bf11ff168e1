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
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.diagnostics import memory_in_use, memory_since_report
from trainable.errors import CheckpointError, ConfigError, NonFiniteMetric, TaskError
from trainable.files import files_of
from trainable.history import History, Row, read_rows
from trainable.inheritance import with_inheritance
from trainable.naming import nearest
from trainable.precision import device_name
from trainable.run import Report, Run, at_best, describe, is_better, one_number
from trainable.seeding import derive_seed, set_determinism, set_seed
from trainable.state import check_state
from trainable.step import known_errors

Yielded = dict[str, Any] | tuple[dict[str, Any], dict[str, Any] | None]
Function = Callable[[TrialConfig, "Context"], Iterator[Yielded]]

FORMAT = 1
_KEYS = {"format", "loop", "progress"}
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


class OwnLoop(Run):
    """Runs a generator function.

    Args:
        function: Takes the run's `TrialConfig` and a `Context`; yields a dict of metrics, or a
            pair of metrics and state.
        config: Given to the function as it is, so that keys are spelt as in the spec:
            `config.train.optimizer.lr`, and `config.task.width` for an argument of the task.
        directory: The run's directory; holds `checkpoints/` and `metrics.jsonl`.
        checkpoints: Where its checkpoints lie instead, `s3://BUCKET/...`.
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
        device: torch.device,
        restore: Path | None = None,
        until: int | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
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
        with store.closed_on_error():
            if restore is None:
                saved = with_inheritance(directory, store.resume(), store.set_aside)
            else:
                saved = store.load(restore)
            self._progress, restored = _parse(saved)
            set_determinism(config.train.deterministic)
            set_seed(config.seed)
            context = Context(
                directory=directory,
                seed=config.seed,
                epochs=config.budget.epochs,
                device=device,
                restored=restored,
                epoch=self._progress.epoch,
                data_seed=config.seed if config.data_seed is None else config.data_seed,
            )
            self._generator = self._start(function, context)
            resumed_at = self._progress.epoch
            interrupted_before = (
                saved is not None and restore is None and resumed_at < config.budget.epochs
            )
            covered = -1 if saved is None else resumed_at
            history = History(directory, files, step=covered, interrupted=interrupted_before)
        earlier = read_rows(directory)
        super().__init__(store=store, history=history, resumed_at=resumed_at, earlier=earlier)

    @property
    def resolved(self) -> dict[str, str]:
        """The device that the loop was told."""
        return {"device": device_name(self._device)}

    def events(self) -> Iterator[Report]:
        """Run the loop, and yield a report for each of its yields.

        Ends when the budget's epochs are reported, when the loop ends by itself (the last report
        is then repeated as the finished one), or without a further report once it is interrupted.

        Raises:
            TaskError: The loop yielded something else than metrics, or nothing at all.
            ConfigError: The metric is not among those yielded, or a run that is to be continued
                yielded no state.
            NonFiniteMetric: The metric became NaN or infinite.
            CheckpointError: The state holds objects that cannot be saved, or could not be written.
        """
        progress, epochs = self._progress, self._last
        interrupted = False
        if progress.epoch >= epochs:
            yield self._news([], finished=True)
        while progress.epoch < epochs and not interrupted:
            with known_errors(self._device):
                yielded = next(self._generator, _OVER)
            if yielded is _OVER:
                if not progress.metrics:
                    raise TaskError(
                        f"{self._name} ended without a report; it must yield a dict of metrics, "
                        "such as {'val/loss': 0.5}, at least once"
                    )
                yield self._news([], finished=True)
                return
            metrics, state = self._check(yielded)
            row, value, new_best = self._note(metrics)
            interrupted = self._interrupted()
            if state is not None:
                self.store.offer(
                    lambda state=state: self._snapshot(state),  # type: ignore[misc]
                    step=progress.epoch,
                    epoch=progress.epoch,
                    boundary=True,
                    value=value,
                    new_best=new_best,
                    final=interrupted or progress.epoch >= epochs,
                    covered=self._history.sync,
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
            yield self._news([row], finished=progress.epoch >= epochs)

    def _release(self) -> None:
        self._generator.close()  # its `finally` blocks run

    def _start(self, function: Function, context: Context) -> Generator[Any, None, None]:
        started = function(self._config, context)
        if not isinstance(started, Generator):
            raise TaskError(
                f"{self._name} returned an object of type {type(started).__name__}; it must be a "
                "generator function: yield a dict of metrics after each epoch"
            )
        return started

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
        return {key: self._number(key, value) for key, value in metrics.items()}, state

    def _number(self, key: object, value: object) -> float:
        if not isinstance(key, str):
            raise TaskError(f"{self._name} yielded a metric named {key!r}; a name is a string")
        # device synchronisation where it is a tensor on one: the loop chose to yield that
        return one_number(value, f"{self._name} yielded {key!r}")

    def _note(self, metrics: dict[str, float]) -> tuple[Row, float, bool]:
        """Count the report and write its row; return the row, the metric, and if it is best."""
        progress, config = self._progress, self._config
        progress.epoch += 1
        metric, *also = config.metrics
        for name in (metric, *also):
            if name not in metrics:
                raise ConfigError(
                    f"{name!r} is not reported{nearest(name, metrics)}; it must be one that "
                    f"{self._name} yields: {', '.join(sorted(metrics))}; write one of these",
                    key="metric",
                )
        value = metrics[metric]
        broken = [name for name in (metric, *also) if not math.isfinite(metrics[name])]
        is_best = not broken and is_better(value, progress.best, config.modes[0])
        if is_best:
            progress.best = value
        self._watch.sample(memory_in_use(self._device))
        memory = memory_since_report(self._device)
        best = at_best(also, metrics, progress.metrics, is_best=is_best)
        progress.metrics = memory | metrics | {"epoch": float(progress.epoch)}
        if progress.best is not None:
            progress.metrics |= {f"best/{metric}": progress.best, **best}
        row = Row(progress.epoch, int(self._wall_clock() * 1000), progress.metrics)
        self._history.append([row])
        self._watch.see(row)
        if broken:
            raise NonFiniteMetric(broken[0], progress.epoch, metrics[broken[0]])
        return row, value, is_best

    def _snapshot(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make the state to be saved."""
        check_state(state)
        return {"format": FORMAT, "loop": state, "progress": asdict(self._progress)}

    def _news(self, rows: list[Row], *, finished: bool) -> Report:
        progress = self._progress
        if finished:
            self.store.wait()
        return self._report(
            progress.epoch, progress.epoch, progress.metrics, rows, finished=finished
        )


def _parse(saved: dict[str, Any] | None) -> tuple[_Progress, dict[str, Any] | None]:
    if saved is None:
        return _Progress(), None
    if set(saved) != _KEYS or saved["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint holds the keys {sorted(saved)} and is not one of a loop of one's own "
            f"in format {FORMAT}; continue with the task and the version that wrote it"
        )
    return _Progress(**saved["progress"]), saved["loop"]
