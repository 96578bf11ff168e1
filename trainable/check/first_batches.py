"""Compute the first training batch and the first evaluation batch of a run, before it starts.

What must not live here: checks of a few samples (`task_checks.py`), and the GPU memory of a step
(`memory_probe.py`).
"""

from __future__ import annotations

import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.parameter import is_lazy

from trainable.base_run import check_reported
from trainable.check.task_checks import Untrained, has_literal, raised
from trainable.config import TrainConfig, TrialConfig
from trainable.errors import NonFiniteGradient, NonFiniteLoss, TaskError, TrainingError
from trainable.evaluation import as_metrics, run_evaluation
from trainable.hooks import Hooks
from trainable.logged import Log, collecting, means, merge_logged
from trainable.seeding import preserved_host_rng
from trainable.step import Step, StepOutcome, translate_torch_errors
from trainable.task import Batch, Task
from trainable.train_state import model_state
from trainable.user_code.task_code import task_code
from trainable.watch.diagnostics import LayerNorms, memory_in_use

if TYPE_CHECKING:
    from trainable.build import Parts

SECONDS = 20.0
"""After so long the first batches are given up: a check must not keep a sweep from starting."""
_STEPS = 3
"""As many as a rehearsal takes before its evaluation."""
_REPEATS = 5
_ENOUGH_SECONDS = 0.5
"""A batch is evaluated so often, and no longer than this. The fastest counts: the first one is
slower."""
_STATUS = Path("/proc/self/status")  # sizes in KiB
_GENERATOR_BYTES = 22_000
"""What a checkpoint has besides tensors: mostly the state of the random generators."""
STEP_METRICS = ("train/loss", "train/grad_norm", "train/lr")
EPOCH_METRICS = ("train/clip_fraction", "train/samples_per_second")


class ObservedStep:
    """Takes the steps of a run, times them, and looks at the graphs of their losses."""

    def __init__(self, step: Step, workers: int = 0) -> None:
        self._step, self._workers = step, workers
        self._loading = 0.0
        self.untrained = Untrained(step.task, step.model, step.parameters)
        self.seconds: list[float] = []
        """Of each step; loader processes fetch samples during other steps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __call__(self, window: Iterable[Batch], *further: Any) -> StepOutcome:
        """Take a step."""
        step, task = self._step, self._step.task
        watch, self._loading = _Watch(step.device), 0.0
        step.task = cast("Task", self.untrained)
        try:
            outcome = step(self._fetched(window), *further)
        finally:
            step.task = task
        seconds = watch.seconds()
        if self._workers:
            seconds = max(seconds - self._loading, self._loading / self._workers)
        self.seconds.append(seconds)
        return outcome

    def _fetched(self, window: Iterable[Batch]) -> Iterator[Batch]:
        batches, started = iter(window), time.perf_counter()
        for batch in batches:
            self._loading += time.perf_counter() - started
            yield batch
            started = time.perf_counter()


class FirstBatches:
    """The first batches of a run."""

    def __init__(
        self,
        parts: Parts,
        config: TrialConfig,
        step: Step | ObservedStep,
        *,
        resumed: bool = False,
    ) -> None:
        self._parts, self._config, self._resumed = parts, config, resumed
        self._is_rehearsed = isinstance(step, ObservedStep)
        workers = config.train.loader.num_workers
        self._step = step if isinstance(step, ObservedStep) else ObservedStep(step, workers)
        self.reported: set[str] = set()
        """The names of the metrics that the first batches have reported."""
        self.cautions: list[str] = []
        """What failed, a sentence each. With other hyperparameters it may not."""
        self.costs: dict[str, Any] = {}
        """`step_seconds`, `evaluation_seconds` (of all batches), `process_bytes` and `gpu_bytes`;
        without those that could not be measured."""

    def compute(self) -> None:
        """Take some steps, evaluate a batch, and check the configuration's metrics; time both.

        A step that was observed before is of a rehearsal, which has trained and has checked them.
        """
        with collecting(self._parts.task) as log, preserved_host_rng():
            if self._is_rehearsed:
                self._note_steps()
                self._evaluate(log)
            # a broken loss breaks the evaluation, too: report it once
            elif self._train(log) and self._evaluate(log):
                self._check_metrics()

    def _train(self, log: Log) -> bool:
        """Take one step, and some more for their time; return whether the first succeeded."""
        parts, config, step = self._parts, self._config.train, self._step
        hooks = Hooks(parts.task, log, parts.model, step.parameters)
        windows = chain(parts.train.windows(0), parts.train.windows(1))
        with self._attempt("the first training batch", certain=True) as tried, task_code():
            hooks.epoch_start(0)
            for number, window in enumerate(islice(windows, _STEPS), start=1):
                try:
                    step(window, number)
                except (NonFiniteLoss, NonFiniteGradient):
                    if number == 1:
                        raise
                    break  # other hyperparameters may train
                hooks.step_end(number)
                tried.append(True)
                if step.seconds[0] > _ENOUGH_SECONDS and not step.untrained.is_suspected:
                    break
            hooks.epoch_end(0)
            self._note_steps()
        if not tried:
            return False
        logged = log.take() | log.take_epoch()
        layers = LayerNorms(step.model, step.parameters).present()
        self.reported |= logged.keys() | reported_names(parts, config, layers)
        return True

    def _note_steps(self) -> None:
        """Note what the steps took, and refuse what they have not changed."""
        device, seconds = self._parts.precision.device, self._step.seconds
        # the first one makes the optimizer's state
        self.costs["step_seconds"] = min(seconds[1:] or seconds)
        self.costs["process_bytes"] = _process_bytes()
        if device.type == "cuda":
            self.costs["gpu_bytes"] = torch.cuda.max_memory_reserved(device)
        if (problem := self._step.untrained.problem()) is not None:
            if not self._resumed:
                raise TaskError(problem)
            self.cautions.append(problem)

    def _evaluate(self, log: Log) -> bool:
        parts = self._parts
        log.prefix, seconds = "val/", list[float]()
        only_batch = parts.val.plan.windows == 1
        with self._attempt("the first validation batch", certain=only_batch) as tried:
            found = run_evaluation(
                parts.task,
                parts.model,
                self._first_batches(seconds),
                precision=parts.precision,
                seed=None,
            )
            tried.append(True)
        if not tried:
            return False
        metrics = as_metrics(found, parts.task, parts.precision.device)
        if seconds and parts.val.plan.windows:  # a stream may not say how many there are
            self.costs["evaluation_seconds"] = min(seconds) * parts.val.plan.windows
        (logged,) = means([log.take()])
        reported = merge_logged(metrics, logged, "evaluate()")
        self.reported |= reported.keys()
        self.cautions += [
            f"{name} is {reported[name]} for the first validation batch, after the first steps; "
            "a metric must be a finite number; look for a division by 0, such as the recall of a "
            "class that no target has"
            for name in self._config.metrics
            if not math.isfinite(reported.get(name, 0.0))
        ]
        return True

    def _first_batches(self, seconds: list[float]) -> Iterator[Batch]:
        """Yield one batch, and some more for their time; append the seconds that each takes."""
        batches = (batch for window in self._parts.val.windows(0) for batch in window)
        watch = _Watch(self._parts.precision.device)
        for batch in islice(batches, _REPEATS):
            yield batch
            seconds.append(watch.seconds())
            if sum(seconds) > _ENOUGH_SECONDS:
                return

    def _check_metrics(self) -> None:
        """Refuse a metric that is not reported, and warn of one that other batches may show.

        A task may report a metric for some batches only. Then its module has the metric's name.
        """
        reported, task = self.reported, self._parts.task
        for metric in self._config.metrics:
            name = metric.removeprefix("val/")
            lacks_prefix = f"val/{metric}" in reported
            if metric in reported or lacks_prefix or not has_literal(task, {name, metric}):
                check_reported([metric], reported)
            else:
                self.cautions.append(
                    f"{metric!r} is not reported for the first batches, although the task's "
                    "module names it; a metric must be reported at the end of each epoch: "
                    f"{', '.join(sorted(reported))}; report it each time, or name another"
                )

    @contextmanager
    def _attempt(self, what: str, *, certain: bool) -> Iterator[list[bool]]:
        """Make a caution of an error of the user's code, which may raise anything.

        The yielded list is filled by the caller; it stays empty after an error.
        """
        done: list[bool] = []
        try:
            with _time_limit(SECONDS), translate_torch_errors(self._parts.precision.device):
                yield done
        except _TooSlow:
            self.cautions.append(
                f"{what} took longer than {SECONDS:g} s, and was not waited for; an epoch has "
                f"{self._parts.train.plan.windows} training batches; check that nothing blocks"
            )
        except (NonFiniteLoss, NonFiniteGradient) as problem:
            self.cautions.append(
                f"{what}: {str(problem).partition(' at step')[0]} before anything was trained; a "
                "loss and its gradient must be finite; look for NaN in the data, and check the "
                "scale of the inputs and the targets"
            )
        except TrainingError as problem:
            if isinstance(problem, TaskError) and problem.__cause__ is None and certain:
                raise
            self.cautions.append(f"{what}: {problem}")
        except Exception as problem:
            self.cautions.append(raised(what, problem))


def reported_names(parts: Parts, config: TrainConfig, layers: Iterable[str] = ()) -> set[str]:
    """Return the metrics that a run reports at the end of an epoch besides the task's own."""
    names = {*STEP_METRICS, *EPOCH_METRICS, *memory_in_use(parts.precision.device)}
    if config.measure_device_time:
        names |= {"train/seconds", "train/device_seconds"}
    if parts.precision.scaler is not None:
        names.add("num_skipped_steps")
    if parts.averaging is not None:
        names.add("num_averaged_weights")
    every = config.layer_norms_every
    plan = parts.reports
    if every and not (plan.windows_per_report % every or plan.total_steps % every):
        # else only in some reports
        names |= {f"grad_norm/{layer}" for layer in layers}
    return names


def checkpoint_bytes(parts: Parts, optimizer_bytes: int, *, trained_only: bool = False) -> int:
    """Return about the bytes of a checkpoint: tensors of model, average and optimizer."""
    own = {
        p.data_ptr(): p.nbytes
        for p in parts.model.parameters()
        if p.requires_grad and not is_lazy(p)
    }
    trained = sum(own.values())
    values = model_state(parts.model).values()
    tensors = [v for v in values if isinstance(v, torch.Tensor) and not is_lazy(v)]
    model = trained if trained_only else sum(t.numel() * t.element_size() for t in tensors)
    average = trained if parts.averaging is not None else 0
    return _GENERATOR_BYTES + optimizer_bytes + model + average


class _Watch:
    """Measures computing. On a CPU that other processes use, too, the time of this one counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start()

    def _start(self) -> None:
        self._wall, self._process = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """Return the seconds since the last reading."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # device synchronisation: to measure its time
        wall, process = time.perf_counter() - self._wall, time.process_time() - self._process
        self._start()
        return min(wall, process) if self._device.type == "cpu" else wall


def _process_bytes() -> int:
    """Return the most memory that this process has had for itself alone."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return peak if sys.platform == "darwin" else peak * 1024
    # not `ru_maxrss`, which counts the memory of the process that started this one
    sizes = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    # The files that it maps, such as torch's libraries, are shared by processes.
    peak, files, shared = (int(sizes[key][0]) for key in ("VmHWM", "RssFile", "RssShmem"))
    return (peak - files - shared) * 1024


class _TooSlow(Exception):
    """The first batches took too long."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_TooSlow` after so many seconds, in the main thread: no other receives a signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)
