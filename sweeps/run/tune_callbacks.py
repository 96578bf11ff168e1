"""Callbacks of Ray Tune: decide what each event of a trial means, and queue its record.

A thread writes, because Tune asks for a worker's next step only after the callback: a GPU would
wait for the disk. Code that decides by the ledger calls `flush` first. A resume finds queued
reports that a dead driver did not write in the trial's directory. Not so the trial's
configuration, what only the worker knows, and changed attributes: a callback writes them before it
returns. What must not live here: writing (`event_writer`), choosing parameters (`search`), and
when to stop (`stopping`).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ray.tune import Callback
from ray.tune.experiment import Trial

from sweeps.engine.ray_compat.tune_internals import end_at_next_loss, release_trial, worker_error
from sweeps.engine.worker_end import WorkerEnd, end_of_worker, end_with_node, left_its_node
from sweeps.errors import SpecError
from sweeps.ledger.attributes import ACCUMULATION, LACKS_MODEL, SIGNALS, WOULD_STOP
from sweeps.ledger.reasons import BY_THE_USER
from sweeps.paths import TRIAL_CONFIG
from sweeps.reconcile.failure_policy import (
    INFRASTRUCTURE_FAILURES,
    MAX_LOST_STARTS,
    CrashCounter,
    Failure,
    RepeatedFailure,
    RepeatedFailureDetector,
)
from sweeps.recording.tags import STOPPED_BY_INTERRUPT, origin_tags
from sweeps.recording.trial_config import keep_earlier
from sweeps.run import stop_requests
from sweeps.run.event_writer import Entry, EventWriter, WorkerReport, WriteQueue
from sweeps.run.session import SweepSession
from sweeps.run.worker_watch import (
    Hang,
    NoWorkerStarts,
    ProgressWatch,
    StartWatch,
    TrialClock,
    WorkerRules,
)
from sweeps.spec.spec import trial_yaml
from sweeps.spec.trial_run import TrialSeed, run_start
from sweeps.stopping.schedulers import StopperScheduler
from sweeps.stores import accepts_checkpoints, trial_store
from sweeps.view.observer import ProgressObserver
from trainable.adapters.ray import OBJECTIVES
from trainable.checkpoint import Generation
from trainable.errors import NodeLeaves
from trainable.processes.trial_log import TRIAL_LOG, TrialLog
from trainable.store.regular_files import make_directory, replace_regular

_AT_FIRST = {SIGNALS: [], LACKS_MODEL: False}
"""What holds of a trial that has made no report; see `WorkerReport.trial_marks`."""
_DROPPED_RESULT_KEYS = (
    "earlier",
    "noted",
    "metrics",
    "signals",
    "lacks_model",
    "resolved",
    "saved",
    "step",
    "config",
    "iterations_since_restore",
    "time_since_restore",
    "time_this_iter_s",
    "time_total_s",
)
"""The keys that `on_trial_result` removes from a result after it has copied them. Tune keeps the
last result of each trial for the whole sweep, and two queues of statistics for each number in
it."""


class TrialMemoryReleaser(Callback):
    """Release the memory of trials that have ended."""

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Release the data that Tune keeps about the trial."""
        del iteration, trials, info
        release_trial(trial)


@dataclass
class _TrialState:
    """What the driver knows of a trial that has not ended, beyond the ledger."""

    phase: Literal["live", "paused"] | None = None
    """Whether it runs or waits at a rung; None: neither yet, or it was interrupted."""
    is_training: bool = False
    """Whether its worker has received the order to train."""
    marks: dict[str, Any] = field(default_factory=lambda: dict(_AT_FIRST))
    """What the ledger has of it; see `WorkerReport.trial_marks`."""
    final_report: WorkerReport | None = None
    """Held back until it is written in one transaction with the end."""
    stop_reason: str | None = None
    """Why it is to stop."""
    deadline: float | None = None
    """When its worker is killed, if the user stops it."""
    lost_starts: int = 0
    hangs: int = 0
    is_killed: bool = False
    """Whether this driver killed its worker: after `hang`, or for the user without one."""
    hang: Hang | None = None
    exhausted: Failure | None = None
    """The failure with which it ends, once it has no retries left."""


class TuneEventHandler(Callback):
    """Queues a record of each event of a trial, and retries or ends trials of lost workers."""

    def __init__(
        self,
        sweep: SweepSession,
        observer: ProgressObserver,
        scheduler: StopperScheduler,
        workers: WorkerRules,
        *,
        on_step: Callable[[], None],
    ) -> None:
        self._spec, self._paths, self._fence = sweep.spec, sweep.paths, sweep.fence
        self._observer, self._scheduler, self._workers = observer, scheduler, workers
        self._on_step = on_step
        failures = sweep.spec.failures
        self._progress = ProgressWatch(sweep.paths, failures.step_timeout)
        self._starts = StartWatch(workers.start_seconds)
        self._clock = TrialClock()
        self._event_writer = EventWriter(sweep, observer, self._clock.seconds)
        self._queue: WriteQueue[Entry] = WriteQueue(self._event_writer.write)
        self._num_existing = len(sweep.ledger.frozen_trials())
        self._trials: defaultdict[int, _TrialState] = defaultdict(_TrialState)
        self._crash_counter = CrashCounter(failures.max_retries)
        self._failures = RepeatedFailureDetector(failures.same_failure_limit, sweep.spec.space)
        self.num_finished = 0
        """How many trials have ended. Some ends may be queued until `flush`."""

    @property
    def abort_reason(self) -> RepeatedFailure | None:
        """The failure that every further trial would repeat; None while there is none."""
        return self._failures.abort_reason

    def flush(self) -> None:
        """Wait until every queued event is written."""
        for trial in self._trials.values():
            self._flush_last_report(trial)
        self._queue.flush()

    def close(self) -> None:
        """Write the queued events without raising; call `flush` first to receive errors."""
        self._queue.close()

    def stop(self, number: int, reason: str, *, live: bool) -> None:
        """End a trial for good: at its next step, or immediately if no worker trains it."""
        self._fence()
        if live:
            trial = self._trials[number]
            trial.stop_reason = reason
            if reason == BY_THE_USER:
                trial.deadline = time.monotonic() + self._workers.grace
            stop_requests.request_stop(self._paths, [number])
            return
        self._end(number, partial(self._event_writer.stopped_waiting, number, reason))
        self.flush()

    def refuse(self, number: int, error: SpecError) -> None:
        """Fail a trial whose parameter values make no valid configuration."""
        # No repeated failure that ends a sweep: the next suggestion may be valid.
        self._end(number, partial(self._event_writer.refused, number, error))
        self.flush()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle no state.

        Ray pickles the Tuner into a file that no process reads, and threads and connections
        cannot be pickled.
        """
        return {}

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Raise errors of the writer, act on signals and stop requests, and kill hung workers."""
        del iteration, info
        self._queue.check()
        self._on_step()
        self._kill_unresponsive_workers()
        any_trains = any(one.is_training for one in self._trials.values())
        if late := self._starts.look([] if any_trains else trials):
            self._failures.stopped(*late)
            raise NoWorkerStarts

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Write the trial's configuration before it trains, count the attempt and open its run."""
        del iteration, trials, info
        self._fence()
        number, params = trial.config["number"], trial.config["params"]
        state = self._trials[number]
        state.is_training, state.lost_starts = True, 0
        directory = self._paths.trial(number)
        make_directory(directory)
        config = self._spec.trial_config(TrialSeed(*trial.config["seed"]), params)
        self._progress.begin(number, config.workers)
        if not self._spec.early_stopping.rule.is_population:  # whose changes the ledger has
            trained = trial.config.get("config", {}).get("train", {})
            keep_earlier(self._paths, self._spec, number, config, trained.get("accumulation"))
        replace_regular(directory / TRIAL_CONFIG, trial_yaml(config).encode())
        # Smaller micro-batches are recorded as a tag: the requested parameters stay unchanged.
        start = run_start(config, params)
        if state.phase == "paused":
            state.phase = "live"
            self._clock.start(number)
            self._queue.put(partial(self._event_writer.promoted, number, start))
            if self._spec.early_stopping.rule.is_population:  # the parameters may have changed
                self.flush()
            return
        is_first = number >= self._num_existing and state.phase is None
        newest = None if is_first else self._newest_generation(number)
        self._crash_counter.started(number, newest.number if newest else 0)
        state.phase = "live"
        if is_first:
            self._clock.start(number)
            tags = origin_tags(trial.config.get("role", "search"), trial.config.get("origin"))
            self._event_writer.open_run(number, start, tags)
            self._queue.put(partial(self._event_writer.record_first_start, number, params))
            return
        step = newest.step if newest else 0
        # Before the new worker trains, read what an earlier one stored but did not send.
        self._queue.put(partial(self._event_writer.record_restart, number, params, start, step))
        self.flush()
        state.marks = self._event_writer.trial_marks(number)
        self._clock.start(number, before=self._event_writer.seconds(number))

    def on_trial_result(
        self,
        iteration: int,
        trials: list[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """Queue a report, and remove the keys from Tune's result that no later code reads."""
        del iteration, trials, info
        number = trial.config["number"]
        report = WorkerReport(
            number, trial.config["params"], dict(result), accumulation_note(trial, result)
        )
        for key in _DROPPED_RESULT_KEYS:
            result.pop(key, None)
        if result.get("ending") is None:  # the scheduler reads the last ones at the trial's end
            result.pop(OBJECTIVES, None)
        state = self._trials[number]
        known = state.marks
        changed = {key: now for key, now in report.trial_marks.items() if now != known[key]}
        report.notes.update(changed)  # also what holds no longer
        known.update(changed)
        if trial.config.get("exempt"):
            self._note_exemption(report)
        self._event_writer.record_worker_info(report)
        # The trial's end comes next, and the checkpoint is saved: see `EventWriter.finished`.
        if result.get("ending") == "finished" and report.result.get("saved"):
            state.final_report = report
        else:
            self._queue.put(report)
        if report.notes:
            self.flush()

    def _note_exemption(self, report: WorkerReport) -> None:
        """Note where an exempt trial would have been stopped, with the report that shows it."""
        found = self._scheduler.would_stop.get(report.number)
        if found is not None and found[0] == report.result.get("epoch"):
            report.notes[WOULD_STOP] = list(found)

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Record the end that the last result names; without one, the trial was pruned."""
        del iteration, trials, info
        number, last, writer = trial.config["number"], trial.last_result, self._event_writer
        state = self._trials[number]
        match last.get("ending"):
            case "finished":
                final, state.final_report = state.final_report, None
                self._end(number, partial(writer.finished, number, final))
                self._failures.passed()
            case "paused" if state.stop_reason is None:
                self._worker_left(number)
                state.phase = "paused"
                self._queue.put(partial(writer.paused, number))
                self._failures.passed()
            case "failed":
                self._failed(number, Failure(**last["failure"]))
            # A trial that drains may end before it reads the stop request of the user.
            case "interrupted" if state.stop_reason is None:
                self._interrupt(number)
            case "stopped" if state.exhausted is not None:
                self._fail(number, state.exhausted)
            case "stopped" | "paused" | "interrupted":
                assert state.stop_reason is not None, f"trial {number} was not asked to stop"
                self._end(number, partial(writer.stopped, number, state.stop_reason))
            case _:
                reason = self._scheduler.stop_reasons.get(number)
                self._end(number, partial(writer.pruned, number, reason))
                self._failures.passed()

    def on_trial_recover(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Count a lost worker, for which Tune starts another one.

        A worker that left its node or was lost with it, or before it began to train, does not
        count as a retry. A trial without retries restarts once more, so that it sees its stop
        file.
        """
        del iteration, trials, info
        self._fence()
        number = trial.config["number"]
        state = self._trials[number]
        self._flush_last_report(state)  # the trial does not end now
        if state.is_killed:
            self._worker_left(number)
            self._restart_after_kill(number, state)
            return
        if left_its_node(worker_error(trial)):
            if state.is_training:
                self._worker_left(number)
                self._note_move(number)
            return
        if self._workers.node_died(worker_error(trial)):
            self._worker_left(number)
            self._note_loss(number, end_with_node(worker_error(trial)))
            return
        if not state.is_training:
            state.lost_starts += 1
            if state.lost_starts == MAX_LOST_STARTS and state.exhausted is None:
                end_at_next_loss(trial)  # workers fail to start: the next loss ends the sweep
            return
        self._worker_left(number)
        end = self._note_worker_end(trial)
        newest = self._newest_generation(number)
        if not self._crash_counter.lost(number, newest.number if newest else 0):
            state.exhausted = self._describe_loss(trial, end)
            stop_requests.request_stop(self._paths, [number])
            end_at_next_loss(trial)  # for a worker that is lost before it reads its stop file
        else:
            self._note_loss(number, end)

    def _note_move(self, number: int) -> None:
        newest = self._newest_generation(number)
        saved = f"saved at step {newest.step}" if newest else "nothing was to save yet"
        sentence = f"{NodeLeaves.text}: {saved}, and continues on another node"
        self._queue.put(partial(self._event_writer.record_lost_worker, number, sentence))

    def _note_loss(self, number: int, end: WorkerEnd) -> None:
        self._queue.put(partial(self._event_writer.record_lost_worker, number, end.sentence()))

    def _kill_unresponsive_workers(self) -> None:
        """Kill workers that make no progress, or that ignore the user's stop request too long."""
        now = time.monotonic()
        watched = {
            number: one
            for number, one in self._trials.items()
            if one.phase == "live" and not one.is_killed
        }
        for hang in self._progress.look(watched):
            self._fence()
            if self._progress.end(hang.number):
                killed = watched.pop(hang.number)
                killed.is_killed, killed.hang = True, hang
                self._observer.warned(hang.number, hang.reason)
        for number, one in self._trials.items():
            if one.deadline is None or one.deadline >= now:
                continue
            one.deadline = None
            if number in watched:
                self._fence()
                if self._progress.end(number):
                    one.is_killed = True
                    self._observer.warned(
                        number,
                        f"reached no step within {self._workers.grace:g} s after the stop "
                        "request; the driver killed its worker; the stacks of its threads are in "
                        "trial.log",
                    )

    def _restart_after_kill(self, number: int, state: _TrialState) -> None:
        """Count a hang after this driver killed the worker; the trial restarts."""
        hang = state.hang
        state.is_killed, state.hang = False, None
        if hang is None:
            return  # the user's stop file exists
        state.hangs += 1
        if state.hangs > self._spec.failures.max_retries:
            state.exhausted = Failure("hang", hang.reason, "")
            # the next worker finds the stop file and ends the trial
            stop_requests.request_stop(self._paths, [number])

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Record the end of a trial whose lost worker Tune does not replace."""
        del iteration, trials, info
        self._fence()
        number = trial.config["number"]
        state = self._trials[number]
        # It has exhausted its retries; otherwise no worker began to train it.
        if state.is_training or state.exhausted is not None:
            end = self._note_worker_end(trial)
            self._fail(number, state.exhausted or self._describe_loss(trial, end))
            return
        self._failures.stopped(number, self._describe_lost_starts(trial))
        if state.phase is not None:
            self._interrupt(number)

    def interrupt_live(self) -> None:
        """Record every trial that has not ended as interrupted."""
        for number in sorted(n for n, one in self._trials.items() if one.phase is not None):
            self._interrupt(number)
        self.flush()

    def _interrupt(self, number: int) -> None:
        tags = {"stopped_by": "failures"} if self.abort_reason else STOPPED_BY_INTERRUPT
        self._worker_left(number)
        self._trials[number].phase = None
        self._flush_last_report(self._trials[number])
        self._queue.put(partial(self._event_writer.record_interruption, number, tags))

    def _failed(self, number: int, failure: Failure) -> None:
        """Record a failure of the trial; interrupt it if its storage or node is the cause."""
        if failure.may_be_trial_specific(socket.gethostname()) and accepts_checkpoints(
            self._paths, self._spec, number
        ):
            failure = failure.as_trial_specific()
        if failure.kind in INFRASTRUCTURE_FAILURES:
            self._failures.stopped(number, failure)
            self._interrupt(number)
        else:
            self._fail(number, failure)

    def _fail(self, number: int, failure: Failure) -> None:
        self._end(number, partial(self._event_writer.failed, number, failure))
        self._failures.failed(number, failure)

    def _worker_left(self, number: int) -> None:
        self._trials[number].is_training = False
        self._clock.stop(number)

    def _end(self, number: int, write: Callable[[], None]) -> None:
        self._worker_left(number)
        self._flush_last_report(self._trials.pop(number))
        self._queue.put(write)
        self.num_finished += 1

    def _flush_last_report(self, trial: _TrialState) -> None:
        last, trial.final_report = trial.final_report, None
        if last is not None:
            self._queue.put(last)

    def _note_worker_end(self, trial: Trial) -> WorkerEnd:
        """Append to a trial's log how its process ended."""
        end = end_of_worker(worker_error(trial))
        log = self._paths.trial(trial.config["number"]) / TRIAL_LOG
        with contextlib.suppress(OSError), TrialLog(log) as file:
            output = f", and wrote last:\n{end.last_lines}" if end.last_lines else ""
            file.write(f"{end.whose} ended{end.how and ' '}{end.how}{output}\n")
        return end

    def _describe_loss(self, trial: Trial, end: WorkerEnd) -> Failure:
        number = trial.config["number"]
        times = self._crash_counter.in_a_row(number)
        count = f"{times} times in a row" if times > 1 else "once"
        whose = "it" if end.rank is None else end.whose
        how = f"; {whose} ended {end.how}" if end.how else ""
        reason = f"lost: its process ended {count} without a new checkpoint{how}"
        return Failure("lost", reason, f"{worker_error(trial)}\n{end.last_lines}".strip())

    def _describe_lost_starts(self, trial: Trial) -> Failure:
        times = self._trials[trial.config["number"]].lost_starts + 1
        end = end_of_worker(worker_error(trial))
        how = f"; the last one ended {end.how}" if end.how else ""
        reason = f"lost: {times} workers in a row ended before they had begun with the trial{how}"
        return Failure("lost", reason, f"{worker_error(trial)}\n{end.last_lines}".strip())

    def _newest_generation(self, number: int) -> Generation | None:
        saved = trial_store(self._paths, self._spec, number).generations()
        return saved[-1] if saved else None


def accumulation_note(trial: Trial, result: dict[str, Any]) -> dict[str, Any]:
    """Return the ledger note for a changed number of micro-batches; empty without a change."""
    train = trial.config["config"]["train"] if "accumulation" in result else {}
    if train.get("accumulation") == result.get("accumulation"):
        return {}
    # The trial keeps the new number wherever it resumes.
    train["accumulation"] = result["accumulation"]
    return {ACCUMULATION: int(result["accumulation"])}
