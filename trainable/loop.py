"""The training loop: resume, step, evaluate, save, report. Read `Trainer.events()` first.

The loop yields reports, and its caller decides whether to continue. The loop knows nothing of
schedulers, trackers or processes. What must not live here: how a step is taken (`step.py`), what
is saved (`train_state.py`) and when (`checkpoint.py`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainable.base_run import (
    BaseRun,
    RunReport,
    best_metrics,
    check_reported,
    errors_reach_ranks,
    is_out_of_patience,
    update_best,
)
from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.errors import NonFiniteGradient, NonFiniteMetric, TaskError
from trainable.hooks import Hooks
from trainable.logged import Log, Sums, close_log, close_run, merge_logged, open_log
from trainable.optim import Scalar, applied_lr, evaluated_weights
from trainable.parallel.rank_checks import (
    check_orders_alike,
    check_weights_alike,
    order_of,
    weight_norms,
)
from trainable.parallel.rank_values import evaluate, means_of_ranks
from trainable.precision import Precision, device_name
from trainable.ranks import Decisions, Ranks
from trainable.report_plan import ReportPlan
from trainable.seeding import derive_seed
from trainable.split_sources import HeldOut
from trainable.step import Step, StepOutcome, raise_if_not_finite, translate_torch_errors
from trainable.store.metrics_file import History, Row
from trainable.streams import Plan, Source
from trainable.task import Batch, Task
from trainable.train_state import EpochStart, TrainState
from trainable.user_code.task_code import task_code
from trainable.watch import heartbeat
from trainable.watch.diagnostics import (
    DeviceTime,
    LayerNorms,
    Throughput,
    memory_in_use,
    memory_since_report,
)
from trainable.watch.health import HealthMonitor

# After this many halvings of the first scale (2**10), the gradient itself is not finite.
_MAX_SKIPPED_IN_A_ROW = 40
# How often per report the memory in use is sampled: enough to detect growth within three reports.
_MEMORY_SAMPLES = 4
# The optimizer's state, and the average of the weights, are copied during the next forward and
# backward pass (Mohan et al., CheckFreq, FAST 2021). Only the next optimizer step changes them,
# and that step waits. Parameters are copied before training continues (7 ms for 67 MB): a forward
# pass may write to them.
_ASYNC_COPY_KEYS = ("optimizer", "average")


@dataclass(frozen=True)
class RunParts:
    """What a run has been built of."""

    step: Step
    state: TrainState
    train: Source
    val: Source
    store: CheckpointStore
    history: History
    plan: ReportPlan
    earlier: Sequence[Row] = ()
    held_out: HeldOut | None = None


class Trainer(BaseRun):
    """One training run. `trainable.build.open_trainer` makes one from a configuration.

    Args:
        config: The run. The first of its metrics decides which state is the best.
        parts: What it has been built of.
        last: The report after which this process ends the run.
        should_stop: Called after every step; once it returns true, the run saves and ends.
        clock: Monotonic seconds, for throughput.
    """

    parts: Any
    """What it was built of (`build.Parts`), for whoever checks it."""

    def __init__(
        self,
        config: TrialConfig,
        parts: RunParts,
        *,
        last: int,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        step, state, store, history = parts.step, parts.state, parts.store, parts.history
        super().__init__(
            store=store,
            history=history,
            ranks=step.ranks,
            resumed_at=state.progress.step,
            earlier=parts.earlier,
        )
        store.before_commit, store.async_copy_keys = history.sync, _ASYNC_COPY_KEYS
        store.milestone = step.schedule.decay_start  # from where a longer run may continue
        self.state = state
        self._step = step
        self._train, self._val = parts.train, parts.val
        for name, source in (("train", parts.train), ("val", parts.val)):
            source.drawing[:] = state.progress.drawing.get(name, source.drawing)
        self._evaluated: int | None = None
        self.held_out = parts.held_out
        self.report_plan, self._last, self._patience = parts.plan, last, config.patience
        self._windows = EpochWindows(parts.train, state, step.ranks)
        self._metrics, self._mode = config.metrics, config.modes[0]
        self._layer_norms = LayerNorms(step.model, step.parameters)
        self._layer_norms_every = config.train.layer_norms_every
        self._throughput = Throughput(clock)
        timed = config.train.measure_device_time
        self._device_time = DeviceTime(step.device, clock) if timed else None
        self._sample_memory_every = max(1, parts.plan.windows_per_report // _MEMORY_SAMPLES)
        self._log = open_log(step.task, history.directory, writes=self._ranks.is_first)
        self._log.load_own_steps()
        self._log.resume_epoch(state.progress.sums)
        self._hooks = Hooks(
            step.task, self._log, step.model, step.parameters, step.ranks, config.seed
        )
        self._hooks.forbid_steps(step.optimizer)
        self._rows = StepRows(state, history, self._log, self._health, self._ranks, parts.earlier)
        self._should_stop, self._must_stop = should_stop, False
        self._decided: Decisions | None = None
        # The hook refers to neither run nor step: a reference cycle would keep the model alive.
        step.optimizer.register_step_pre_hook(lambda *_: store.wait_for_copy())

    @errors_reach_ranks
    def events(self) -> Iterator[RunReport]:
        """Train, and yield a report after each evaluation.

        Ends after the last report. Ends without a further report once `should_stop` returns true:
        everything is then saved, and a resumed run continues from that step.

        A run that had already finished yields its last report once more, without rows. The process
        that yielded it first may have died before its caller recorded it.

        Raises:
            NonFiniteLoss: The loss became NaN or infinite; that step changed no parameter.
            NonFiniteGradient: The loss is finite and its gradient is not.
            OutOfMemory: The device's memory did not suffice.
            NonFiniteMetric: A secondary metric is not finite, or the first one never was.
            ConfigError: A metric is not reported.
            CheckpointError: A checkpoint could not be written.
        """
        progress, stopping = self.state.progress, False
        if self._is_over():
            yield self._make_report([])
        while not self._is_over() and not stopping and self._ranks.next_report():
            with translate_torch_errors(self._step.device), self._rows.written_on_error():
                self._throughput.start()
                heartbeat.beat("step")
                ended = self._train_one()
                while not self.report_plan.is_due(progress):  # else saved after evaluation
                    if self._maybe_save(end_of_epoch=ended):
                        return
                    ended = self._train_one()
                found = self._metrics_since_report() | self._gpu.read()
                found |= self._evaluate() | memory_since_report(self._step.device)
                found = self._metrics_of_ranks(found)
                value = self._value_of_metric(found)
                new_best = self._update_best(value, found)
            self._step.schedule.observe(value, progress.step)
            self._close_report(found)
            stopping = self._maybe_save(
                end_of_epoch=ended, at_report=True, value=value, new_best=new_best
            )
            yield self._make_report(self._rows.take())

    def shorten(self, epoch: int, last: int) -> None:
        """Cut the run short for a rehearsal; the schedule is that of the whole run.

        An epoch has at most `epoch` windows; a report follows, which evaluates one batch. The run
        saves and ends at step `last`, unless the whole run ends before it.
        """
        plan = self.report_plan
        self._windows.most = plan.most = min(epoch, self._train.plan.windows or epoch)
        self._evaluated, self.stop_at = 1, min(last, plan.total_steps)
        self._last = last  # reports, of which there are fewer

    @property
    def model(self) -> nn.Module:
        """The model in training."""
        return self._step.model

    @property
    def task(self) -> Task:
        """The task in training."""
        return self._step.task

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self._step.optimizer.param_groups

    @property
    def precision(self) -> Precision:
        """The precision of forward and backward passes, and their device."""
        return self._step.precision

    @property
    def position(self) -> int:
        """Optimizer steps taken."""
        return self.state.progress.step

    @property
    def resolved(self) -> dict[str, str]:
        """The device and the precision."""
        return {"device": device_name(self._step.device), "precision": self.precision.name}

    @property
    def plans(self) -> tuple[Plan, Plan]:
        """How training and validation samples become windows and micro-batches."""
        return self._train.plan, self._val.plan

    def _release(self) -> None:
        try:
            self.store.wait()  # the ranks may be writing their shards together
        finally:
            self._ranks.close()
        close_log(self._step.task, self._log)
        close_run(self._history.directory)
        self._train.close()
        self._val.close()

    # The parts of a report

    def _is_over(self, report: int | None = None) -> bool:
        """Return whether the run ends with a report; None: with the last one."""
        progress = self.state.progress
        number = progress.reports if report is None else report
        return number >= self._last or is_out_of_patience(self._patience, progress.since_best)

    def _maybe_save(
        self,
        *,
        end_of_epoch: bool,
        at_report: bool = False,
        value: float | None = None,
        new_best: bool = False,
    ) -> bool:
        """Save if a checkpoint is due; return whether the run stops. The first rank decides."""
        progress, store = self.state.progress, self.store
        is_over = at_report and self._is_over()
        decided, self._decided = self._decided, None
        if decided is None or end_of_epoch or at_report:  # else the step's exchange told it
            now = self._decide(
                progress.step,
                epoch=progress.epoch if end_of_epoch else None,
                report=progress.reports if at_report else None,
                certain=new_best or is_over,
            )
            decided = Decisions(*self._ranks.agree(now))
        if decided.is_observed:
            store.observe(progress.step, self._whole_snapshot)
        if decided.saves:
            store.save(
                self._snapshot,
                step=progress.step,
                reports=progress.reports,
                value=value,
                final=decided.stops or is_over,
            )
        return decided.stops

    def _decide(
        self,
        step: int,
        *,
        epoch: int | None = None,
        report: int | None = None,
        certain: bool = False,
    ) -> Decisions:
        """Decide what follows a step. With several ranks the first one's decision counts.

        With several ranks it is asked before the step's exchange, which takes the answer to the
        others, and again at the end of an epoch or report.
        """
        if self._ranks.is_first and self._should_stop():
            self._must_stop = True
        stops = self._must_stop or step >= self.stop_at
        certain = certain or stops or step == self.store.milestone
        due = self.store.is_due(step=step, epoch=epoch, report=report, certain=certain)
        return Decisions(stops, due, self.store.is_observed(step))

    def _train_one(self) -> bool:
        """Train one window, of the next epoch if this has ended; return whether it ends one."""
        progress, windows = self.state.progress, self._windows
        if not windows.are_open:
            if progress.window == 0 and not progress.epoch_begun:  # else it resumes within
                self._hooks.epoch_start(progress.epoch)
                progress.sums = self._log.end_step(taken=True)
            progress.epoch_begun = True
            windows.open()
            self.report_plan.check_epoch(progress, self._step.schedule)
        window = windows.next()
        if window is not None:
            self._take_step(window)
        if window is not None and not windows.are_over:
            return False
        windows.end()
        self._hooks.epoch_end(progress.epoch)
        progress.sums = self._log.end_step(taken=True)
        progress.epoch, progress.window, progress.epoch_begun = progress.epoch + 1, 0, False
        progress.epoch_samples = 0
        return True

    def _take_step(self, window: Iterable[Batch]) -> None:
        """Take one step, advance the counters, and keep the values on the device."""
        progress = self.state.progress
        number = self._log.step = progress.step + 1
        lr = applied_lr(self._step.optimizer)
        self._ranks.sync_buffers(self._step.model)
        decide = partial(self._decide, number)
        with task_code():
            if self._device_time is None:
                outcome = self._step(window, number, decide)
            else:
                window = list(window)  # fetched first: loading does not count as device time
                with self._device_time.measure():
                    outcome = self._step(window, number, decide)
        heartbeat.beat("step")
        size = self._train.plan.size(progress.window)
        progress.window += 1
        progress.since_report += 1
        progress.samples += size
        self._throughput.count(size)
        self._gpu.sample()
        if progress.window % self._sample_memory_every == 0:
            self._health.sample(memory_in_use(self._step.device))
        if outcome.taken:
            self._hooks.step_end(number)
            if self._step.average is not None:  # of the weights as the hook leaves them
                self._step.average.update(number)
        logged = self._log.take()
        progress.sums = self._log.end_step(taken=outcome.taken)
        if not outcome.taken:
            self._count_skipped(outcome, number)
            return
        progress.step, progress.skipped_in_a_row = number, 0
        self._decided = outcome.decided
        every = self._layer_norms_every
        layers = self._layer_norms.present() if every and number % every == 0 else None
        now = int(time.time() * 1000)
        self._rows.add(PendingStep(number, now, outcome, lr, layers, logged))

    def _count_skipped(self, outcome: StepOutcome, number: int) -> None:
        progress = self.state.progress
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        if progress.skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteGradient(number, float(outcome.grad_norm))

    def _snapshot(self) -> dict[str, Any]:
        """Write the rows of all steps, then return the state to be saved."""
        self._rows.fetch_and_write()
        sources = {"train": self._train, "val": self._val}
        self.state.progress.drawing = {
            name: [*one.drawing] for name, one in sources.items() if one.drawing
        }
        return self.state.state_dict()

    def _whole_snapshot(self) -> dict[str, Any]:
        """As `_snapshot`; on the first rank, the state of a sharded model is put together."""
        state, layout = self._snapshot(), self._step.layout
        return state if layout is None else layout.put_together(state)

    def _metrics_since_report(self) -> dict[str, float]:
        """Fetch the steps' values and return the metrics counted since the previous report."""
        # Device synchronisation: one transfer. No step is in flight when throughput is read.
        logged = self._rows.fetch()
        progress = self.state.progress
        taken = progress.step - progress.reported_step
        metrics = logged | {
            "train/clip_fraction": progress.clipped / taken if taken else 0.0,
            "train/samples_per_second": self._throughput.read(),
        }
        if self._device_time is not None:
            metrics["train/seconds"] = self._throughput.seconds
            metrics["train/device_seconds"] = self._device_time.read()
        if self._step.precision.scaler is not None:
            metrics["num_skipped_steps"] = float(progress.skipped)
        if self._step.average is not None:
            metrics["num_averaged_weights"] = float(self._step.average.count)
        return metrics

    def _metrics_of_ranks(self, found: dict[str, float]) -> dict[str, float]:
        """Return the first rank's metrics, after a check that all ranks have the same weights."""
        own = [weight_norms(self._step), self._rows.last_metrics, found]
        of_ranks = self._ranks.gather_plain(own)
        check_weights_alike([norms for norms, *_ in of_ranks], self._step)
        _, self._rows.last_metrics, found = of_ranks[0]
        return found

    def evaluate_on(
        self, source: Source, split: str, seed: int | None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Evaluate the model; return the metrics that `evaluate()` returned, and those it logged.

        With `seed` None it draws from the present generators.
        """
        heartbeat.beat("evaluation")
        step, windows = self._step, _present(source, self._evaluated)
        self._log.prefix = f"{split}/"
        try:
            with evaluated_weights(step.optimizer):
                return evaluate(
                    step,
                    (_with_heartbeat(step.passes(window)) for window in windows),
                    split=split,
                    seed=seed,
                    take_logged=self._log.take,
                    objects=[*self.state.objects, step.left_out],
                )
        finally:
            self._log.prefix = ""

    def _evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data."""
        metrics, logged = self.evaluate_on(self._val, "val", derive_seed("validation"))
        source, progress = f"{type(self._step.task).__name__}.evaluate()", self.state.progress
        names = [name.removeprefix("val/") for name in metrics]
        if missing := [f"val/{key}" for key in progress.evaluated if key not in names]:
            raise TaskError(
                f"{source} returned {', '.join(missing)} in report {progress.reports} and not in "
                f"report {progress.reports + 1}; a metric is in every report or in none; return "
                "it each time, whatever the batches (a collate that draws or mixes needs "
                "Data(collate_val=...))"
            )
        progress.evaluated = sorted(names)
        return merge_logged(metrics, logged, source)

    def _value_of_metric(self, found: dict[str, float]) -> float:
        reported = self._rows.last_metrics | found
        check_reported(self._metrics, reported)
        first, *secondary = self._metrics
        for metric in secondary:
            if not math.isfinite(reported[metric]):
                raise NonFiniteMetric(metric, self.state.progress.reports + 1, reported[metric])
        return reported[first]

    def _update_best(self, value: float, found: dict[str, float]) -> bool:
        """Update the best value and add it to the report; return whether `value` is the best."""
        progress = self.state.progress
        is_best = update_best(progress, value, self._mode)
        if progress.best is None and self._is_over(progress.reports + 1):
            # the run would end without any best state
            raise NonFiniteMetric(self._metrics[0], progress.reports + 1, value)
        now = self._rows.last_metrics | found
        found |= best_metrics(self._metrics, progress, now, is_best=is_best)
        return is_best

    def _close_report(self, found: dict[str, float]) -> None:
        """Count the report; add its metrics to the row of the last step."""
        progress = self.state.progress
        progress.reports, progress.since_report = progress.reports + 1, 0
        found |= self.report_plan.numbers(progress)
        progress.clipped, progress.reported_step = 0, progress.step
        progress.sums = {}
        self._rows.end_report(found, int(time.time() * 1000))
        progress.metrics = self._rows.last_metrics
        # again: a plateau schedule may just have lowered the learning rate
        self._step.schedule.set_lr(self._step.optimizer, progress.step)
        self._rows.write()

    def _make_report(self, rows: list[Row]) -> RunReport:
        progress = self.state.progress
        return self._report(
            progress.step,
            progress.reports,
            progress.metrics,
            rows,
            finished=self._is_over(),
            out_of_patience=is_out_of_patience(self._patience, progress.since_best),
        )


def _present(source: Source, most: int | None) -> Iterator[Iterable[Batch]]:
    """Yield the windows of an evaluation, of the data as they are when the first one is asked."""
    source.begin(0)
    yield from islice(source.windows(0), most)


def _with_heartbeat(batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        heartbeat.beat("evaluation")


class EpochWindows:
    """The windows of an epoch, opened once: an evaluation in between leaves them as they are."""

    def __init__(self, source: Source, state: TrainState, ranks: Ranks) -> None:
        self._source, self._state, self._ranks = source, state, ranks
        self.most: int | None = None
        """Windows of an epoch that a rehearsal cuts short; None: all."""
        self._windows: Iterator[Iterable[Batch]] | None = None
        self._start = state.epoch_start or EpochStart(source)
        self._remap_position(source.plan.batch_size)

    @property
    def are_open(self) -> bool:
        """Whether the epoch has begun in this process."""
        return self._windows is not None

    def open(self) -> None:
        """Begin the epoch, or resume within it."""
        progress = self._state.progress
        source, epoch = self._source, progress.epoch
        with self._ranks.together() as message:
            if progress.epoch_samples:
                source.resume(epoch, progress.epoch_samples)
            elif progress.window == 0:  # else a stream resumes
                progress.epoch_samples = source.begin(epoch)
                self._start.take()
            if self._ranks.size > 1:
                message.own = order_of(source.plan, epoch, progress.epoch_samples)
        if self._ranks.size > 1:
            check_orders_alike(message.of_ranks, epoch)
        self._windows = self._start.windows(epoch, progress.window)

    def next(self) -> Iterable[Batch] | None:
        """Return the next window, None after the last one.

        With several ranks, an error of its data is raised by its micro-batches instead: within the
        exchange, on every rank.
        """
        assert self._windows is not None
        try:
            return next(self._windows, None)
        except Exception as error:
            if self._ranks.size == 1:
                raise
            return _raising(error)

    @property
    def are_over(self) -> bool:
        """Whether the epoch's last window is trained; a stream does not say."""
        progress = self._state.progress
        if self.most is not None and progress.window >= self.most:
            return True
        return 0 < self._source.plan.num_windows(progress.epoch) <= progress.window

    def end(self) -> None:
        """End the epoch; raise `TaskError` if it ended before its last window."""
        assert self._windows is not None
        progress = self._state.progress
        is_cut = self.most is not None and progress.window >= self.most
        for _ in () if is_cut else self._windows:  # a loader's processes must hear of the end
            break
        self._windows = None
        self._start.forget()
        promised = self._source.plan.num_windows(progress.epoch)
        if progress.window < promised and not is_cut:
            raise TaskError(
                f"train: {progress.window} of {promised} windows of epoch {progress.epoch + 1} "
                "came; an epoch has as many windows as len(dataset) promises; return a sample for "
                "every index below len(dataset)"
            )

    def _remap_position(self, batch_size: int) -> None:
        """Convert the position in the epoch after a change of `batch_size`.

        No sample is left out; those of a partly trained window are trained again.
        """
        progress = self._state.progress
        before = progress.batch_size or batch_size
        progress.window = progress.window * before // batch_size
        progress.batch_size = batch_size


def _raising(error: Exception) -> Iterator[Batch]:
    raise error
    yield


# So a non-finite loss raises at most this many steps late; no parameter is changed in between.
_FETCH_EVERY = 512


class StepRows:
    """The rows of a run that are not yet reported."""

    def __init__(
        self,
        state: TrainState,
        history: History,
        log: Log,
        health: HealthMonitor,
        ranks: Ranks,
        earlier: Sequence[Row],
    ) -> None:
        self._state, self._ranks = state, ranks
        self._history, self._log, self._health = history, log, health
        self._logged: list[Row] = []
        self._pending: list[PendingStep] = []
        self._unwritten: list[Row] = []
        self._scheduled: dict[int, float] = {}
        self._unreported = [row for row in earlier if row.step > state.progress.reported_step]
        self.last_metrics = earlier[-1].metrics if earlier else {}
        """The metrics of the last step taken. They are needed at the epoch's end if fp16 has
        skipped all windows since a save."""

    def add(self, step: PendingStep) -> None:
        """Add a step, whose values may be on the device still; fetch many steps' at once."""
        self._pending.append(step)
        if len(self._pending) >= _FETCH_EVERY:
            self._fetch(self._ranks)

    def fetch(self) -> dict[str, float]:
        """Fetch the values of all steps and make rows of them; every rank calls this.

        Device synchronisation: one transfer, and where the task logs tensors one more.
        """
        (of_epoch,) = self._fetch(self._ranks, self._log.take_epoch())
        return of_epoch

    def write(self) -> None:
        """Write the rows that are made, and what the task has logged besides."""
        self._history.append(self._unwritten)
        logged = self._log.take_rows(self.last_metrics)
        self._history.append_logged(self._state.progress.step, logged)
        self._logged += logged
        for row in self._unwritten:
            self._health.observe(row, self._scheduled.pop(row.step, None))
        self._unreported += self._unwritten
        self._unwritten = []

    def fetch_and_write(self) -> None:
        """Write the rows of all steps; after an error those of the steps before it."""
        self._fetch_and_write(self._ranks)

    @contextlib.contextmanager
    def written_on_error(self) -> Iterator[None]:
        """On an error, write the rows of earlier steps first: they show what led to it."""
        try:
            yield
        except Exception:
            # after an error the ranks no longer act in step
            ranks = self._ranks if self._ranks.size == 1 else None
            with contextlib.suppress(RuntimeError):  # the device may no longer respond
                self._fetch_and_write(ranks)
            raise

    def end_report(self, found: dict[str, float], timestamp_ms: int) -> None:
        """Add the metrics of a report to the row of the last step."""
        self.last_metrics = self.last_metrics | found
        if self._unwritten:
            last = self._unwritten.pop()
            self._unwritten.append(last._replace(metrics=self.last_metrics))
        else:  # fp16 skipped every window since a save wrote the last row
            self._unwritten.append(Row(self._state.progress.step, timestamp_ms, found))

    def take(self) -> list[Row]:
        """Return the rows since the last report, once."""
        rows, self._logged, self._unreported = [*self._logged, *self._unreported], [], []
        return rows

    def _fetch(self, ranks: Ranks | None, *more: Sums) -> list[dict[str, float]]:
        """Make rows of all steps; return the means of `more`."""
        pending, self._pending = self._pending, []
        all_logged = means_of_ranks([*(entry.logged for entry in pending), *more], ranks)
        of_steps, of_more = all_logged[: len(pending)], all_logged[len(pending) :]
        values = fetch_values(pending)
        for entry, (loss, norm, clipped, weight), logged in zip(
            pending, values, of_steps, strict=True
        ):
            raise_if_not_finite(loss, norm, entry.step)
            metrics = {"train/loss": loss, "train/grad_norm": norm, "train/lr": entry.lr} | logged
            self._scheduled[entry.step] = entry.outcome.lr
            if entry.layers is not None:
                # Device synchronisation: one for each of the `layer_norms_every`-th steps.
                metrics |= LayerNorms.metrics(entry.layers, entry.outcome.norms.tolist(), weight)
            self._state.progress.clipped += bool(clipped)
            self._unwritten.append(Row(entry.step, entry.timestamp_ms, metrics))
            self.last_metrics = metrics
        return of_more

    def _fetch_and_write(self, ranks: Ranks | None) -> None:
        try:
            self._fetch(ranks)
        finally:
            self.write()


class PendingStep(NamedTuple):
    """A step whose values may still be on the device."""

    step: int
    timestamp_ms: int
    outcome: StepOutcome
    lr: float
    layers: list[str] | None
    logged: Sums


def fetch_values(pending: list[PendingStep]) -> list[tuple[float, ...]]:
    """Return loss, gradient norm, whether clipped, and weight of each step."""
    rows = [(o.loss, o.grad_norm, o.clipped, o.weight) for _, _, o, *_ in pending]
    if not any(isinstance(value, Tensor) for row in rows[:1] for value in row):
        return [tuple(map(float, row)) for row in rows]
    columns = [_column(values) for values in zip(*rows, strict=True)]
    fetched = torch.stack(columns).tolist()  # device synchronisation: one for all these steps
    return list(zip(*fetched, strict=True))


def _column(values: Sequence[Scalar | bool]) -> Tensor:
    """Stack one value of many steps, on the device where it was computed."""
    return torch.stack([v for v in values if isinstance(v, Tensor)]).double()
