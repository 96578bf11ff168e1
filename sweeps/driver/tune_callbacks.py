"""Bookkeeping: what it means that something happened to a trial.

Ray Tune calls; the bookkeeper decides in memory what has to be decided at once, and has a thread
write it down: Tune asks a worker for its next step only after the callback, so a GPU would wait
for the disk. Whoever reads what was written, to decide something, settles first. A driver that
dies before something was written is like one that died before it was told: the store has it, and
a resume brings it to the ledger. What no store has is recorded before the callback returns: with
what a trial began, what its worker says of itself, and what the ledger is to note of it. What must
not live here: writing (`bookkeeping`, `writing`), and deciding what to try or when to stop.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from sweeps.checkpoint_locations import takes_checkpoints, trial_store
from sweeps.config.logged_params import trial_parameters
from sweeps.config.spec import SpecError, SweepSpec, trial_yaml
from sweeps.driver import stop_requests
from sweeps.driver.event_writer import Entry, EventWriter, WorkerReport
from sweeps.driver.progress import Hang, ProgressWatch
from sweeps.driver.write_queue import WriteQueue
from sweeps.engine.worker_end import WorkerEnd, end_of_worker
from sweeps.ledger.ledger import ACCUMULATION, SIGNALS, Ledger, TrialRecord
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.policies.failure_policy import (
    MOST_LOST_STARTS,
    NOT_THE_TRIALS_DOING,
    CrashCounter,
    Failure,
    RepeatedFailure,
    RepeatedFailureDetector,
)
from sweeps.recording.tags import BY_THE_USER, STOPPED_BY_INTERRUPT
from sweeps.results.observer import ProgressObserver
from tracking.recorder import Recorder
from trainable.files import make_directory
from trainable.regular_files import replace_regular
from trainable.trial_log import TRIAL_LOG, TrialLog

_DROPPED_RESULT_KEYS = (
    "earlier",
    "noted",
    "rows",
    "metrics",
    "signals",
    "resolved",
    "saved",
    "step",
    "config",
    "iterations_since_restore",
    "time_since_restore",
    "time_this_iter_s",
    "time_total_s",
)
"""What leaves a result once it is written down. Tune keeps the last result of each trial for as
long as the sweep lasts, and statistics with two queues for each number in it."""


class TrialMemoryReleaser(Callback):
    """Lets go of what Tune keeps of each trial that has ended for as long as the sweep lasts, and
    nobody asks for again: its configuration, metrics and results.
    """

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        del iteration, trials, info
        bare = Trial(trial.trainable_name, config={"number": trial.config["number"]}, stub=True)
        for kept in ("config", "_Trial__unresolved_config", "evaluated_params", "experiment_tag"):
            setattr(trial, kept, getattr(bare, kept))
        trial.run_metadata = bare.run_metadata
        trial._default_result_or_future = None


class TuneEventHandler(Callback):
    """Has written down what happens to trials.

    Args:
        spec: The sweep.
        paths: Where each trial's directory is.
        fence: Called right before anything is written; raises when another driver may run the
            sweep by now.
        on_step: Called once per turn of Tune's loop; the sweep's owner acts on signals there.
        on_end: Called with the record of each trial that has its end, in the thread that writes.
        node_died: Whether an actor was lost with the whole node that it ran on.
        end_of_worker: How the process of a lost actor ended.
        grace: Seconds after which a trial that the user stops has to have ended.
    """

    def __init__(
        self,
        spec: SweepSpec,
        paths: SweepPaths,
        ledger: Ledger,
        recorder: Recorder,
        view: ProgressObserver,
        *,
        fence: Callable[[], None],
        on_step: Callable[[], None],
        on_end: Callable[[TrialRecord], None],
        node_died: Callable[[Exception | None], bool] = lambda _: False,
        end_of_worker: Callable[[Exception | None], WorkerEnd] = end_of_worker,
        grace: float = math.inf,
    ) -> None:
        self._view = view
        self._progress = ProgressWatch(paths, spec.failures.step_timeout)
        self._grace = grace
        self._spec = spec
        self._paths = paths
        self._fence = fence
        self._on_step = on_step
        self._node_died = node_died
        self._end_of_worker = end_of_worker
        self._books = EventWriter(spec, paths, ledger, recorder, view, fence=fence, on_end=on_end)
        self._writer: WriteQueue[Entry] = WriteQueue(self._books.write)
        self._num_existing = len(ledger.frozen_trials())
        self._live: set[int] = set()
        self._paused: set[int] = set()
        self._last: dict[
            int, WorkerReport
        ] = {}  # what is written with the end, which is about to come
        self._signals: dict[int, list[str]] = {}  # as they were noted last
        self._stop_requested: dict[int, str | None] = {}
        self._begun: set[int] = set()  # those whose worker has been told to train
        self._lost_starts: Counter[int] = Counter()
        self._losses = CrashCounter(spec.failures.max_retries)
        self._retries_exhausted: dict[int, Failure] = {}
        self._hangs: Counter[int] = Counter()
        self._ended: dict[int, Hang | None] = {}  # whose workers this driver ended; None: as asked
        self._deadlines: dict[int, float] = {}  # of trials that the user stops
        self._failures = RepeatedFailureDetector(spec.failures.same_failure_limit)
        self.num_finished = 0
        """How many trials came to their end; whether that is written shows `settle`."""

    @property
    def abort_reason(self) -> RepeatedFailure | None:
        """Why more trials would only fail like those before, once that is so."""
        return self._failures.abort_reason

    def flush(self) -> None:
        """Wait until all that happened is written down.

        Raises:
            BaseException: What kept it from being written, as it was; nothing was written after.
        """
        for number in list(self._last):
            self._flush_last_report(number)
        self._writer.flush()

    def close(self) -> None:
        """Write what waits, unless that cannot be; call `settle` before to hear of it."""
        self._writer.close()

    def stop(self, number: int, reason: str | None, *, live: bool) -> None:
        """Let a trial end for good: at its next step, or at once if nobody works on it.

        Args:
            reason: Why, for people; None: the scheduler never let it go on.
            live: Whether Tune has the trial.
        """
        self._fence()
        if live:
            self._stop_requested[number] = reason
            if reason == BY_THE_USER:
                self._deadlines[number] = time.monotonic() + self._grace
            stop_requests.request_stop(self._paths, [number])
            return
        self._end(number, partial(self._books.stopped_waiting, number, reason))
        self.flush()

    def refuse(self, number: int, error: SpecError) -> None:
        """Let a trial fail whose values are no configuration. It is not counted with the failures
        that end a sweep: what else is drawn may well be one.
        """
        self._end(number, partial(self._books.refused, number, error))
        self.flush()

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Ray pickles the Tuner into a file that is never read, and what is held here
        has no copy.
        """
        return {}

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        del iteration, trials, info
        self._writer.check()
        self._on_step()
        self._end_workers_that_do_not_answer()

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Write down with what the trial trains, before it does; count the attempt and open its
        run. What an earlier worker stored and could not tell is read before this one begins.
        """
        del iteration, trials, info
        self._fence()
        number, params = trial.config["number"], trial.config["params"]
        self._begun.add(number)
        self._lost_starts.pop(number, None)
        directory = self._paths.trial(number)
        make_directory(directory)
        self._progress.forget(number)
        config = self._spec.trial_config(number, params)
        replace_regular(directory / TRIAL_CONFIG, trial_yaml(config).encode())
        # Of halved micro-batches a tag tells: they are no change of what the trial was asked for.
        parameters = trial_parameters(config, params)
        if number in self._paused:
            self._paused.discard(number)
            self._live.add(number)
            self._writer.put(partial(self._books.promoted, number, parameters))
            if self._spec.early_stopping.rule.is_population:  # perhaps with other parameters
                self.flush()
            return
        is_first = number >= self._num_existing and number not in self._live
        self._losses.started(number, 0 if is_first else self._newest_generation(number))
        self._live.add(number)
        if is_first:
            self._signals[number] = []
            self._books.open_run(number, parameters)
            self._writer.put(partial(self._books.record_first_start, number, params))
            return
        self._writer.put(partial(self._books.record_restart, number, params, parameters))
        self.flush()
        self._signals[number] = self._books.signals(number)

    def on_trial_result(
        self,
        iteration: int,
        trials: list[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """Record a report, and leave Tune only what is asked of its result later."""
        del iteration, trials, info
        number = trial.config["number"]
        told = WorkerReport(
            number, trial.config["params"], dict(result), accumulation_note(trial, result)
        )
        for key in _DROPPED_RESULT_KEYS:
            result.pop(key, None)
        if told.signals not in (None, self._signals.setdefault(number, [])):
            told.notes[SIGNALS] = self._signals[number] = told.signals  # also that all is well
        self._books.record_worker_info(told)
        # Its end comes next, and its checkpoint lies in the store; see `EventWriter.finished`.
        if result.get("ending") == "finished" and told.result.get("saved"):
            self._last[number] = told
        else:
            self._writer.put(told)
        if told.notes:
            self.flush()

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Give the trial the end that its last result tells; none means that a scheduler stopped
        it.
        """
        del iteration, trials, info
        number, last, books = trial.config["number"], trial.last_result, self._books
        match last.get("ending"):
            case "finished":
                self._end(number, partial(books.finished, number, self._last.pop(number, None)))
                self._failures.passed()
            case "paused" if number not in self._stop_requested:
                self._begun.discard(number)
                self._live.discard(number)
                self._paused.add(number)
                self._writer.put(partial(books.paused, number))
                self._failures.passed()
            case "failed":
                self._failed(number, Failure(**last["failure"]))
            case "interrupted":
                self._interrupt(number)
            case "stopped" if number in self._retries_exhausted:
                self._fail(number, self._retries_exhausted[number])
            case "stopped" | "paused":
                self._end(number, partial(books.stopped, number, self._stop_requested[number]))
            case _:
                self._end(number, partial(books.pruned, number))
                self._failures.passed()

    def on_trial_recover(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """A worker was lost, and Tune starts another one. One that is lost again and again without
        coming further only starts to be told that it is over; with its node any is lost. One that
        has not begun has lost nothing, and nothing is counted.
        """
        del iteration, trials, info
        self._fence()
        self._flush_last_report(trial.config["number"])  # its end does not come yet
        if trial.config["number"] in self._ended:
            self._begun.discard(trial.config["number"])
            self._go_on_after_hang(trial)
            return
        if self._node_died(trial.get_pickled_error()):
            self._begun.discard(trial.config["number"])
            return
        number = trial.config["number"]
        if number not in self._begun:
            self._lost_starts[number] += 1
            if (
                self._lost_starts[number] == MOST_LOST_STARTS
                and number not in self._retries_exhausted
            ):
                trial.max_failures = 0  # no worker starts here; the next loss ends the sweep
            return
        self._begun.discard(number)
        end = self._note_worker_end(trial)
        if not self._losses.lost(number, self._newest_generation(number)):
            self._retries_exhausted[number] = self._describe_loss(trial, end)
            stop_requests.request_stop(self._paths, [number])
            trial.max_failures = 0  # if it does not even live to hear it

    def _end_workers_that_do_not_answer(self) -> None:
        """End the workers of trials that make no progress, and of those that the user stops and
        that come to no step.
        """
        now = time.monotonic()
        for hang in self._progress.look(self._live - self._ended.keys()):
            self._fence()
            if self._progress.end(hang.number):
                self._ended[hang.number] = hang
                self._view.warned(hang.number, hang.reason)
        for number in [one for one, deadline in self._deadlines.items() if deadline < now]:
            del self._deadlines[number]
            if number in self._live - self._ended.keys():
                self._fence()
                if self._progress.end(number):
                    self._ended[number] = None
                    self._view.warned(
                        number,
                        f"came to no step within {self._grace:g} s after it was to stop; its "
                        "process was ended, and the stacks of its threads are in trial.log",
                    )

    def _go_on_after_hang(self, trial: Trial) -> None:
        """A worker was lost because this driver ended it: the trial starts again, to go on or to
        be told that it is over.
        """
        number = trial.config["number"]
        hang = self._ended.pop(number)
        if hang is None:
            return  # its stop file is there
        self._hangs[number] += 1
        if self._hangs[number] > self._spec.failures.max_retries:
            self._retries_exhausted[number] = Failure("hang", hang.reason, "")
            stop_requests.request_stop(self._paths, [number])

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """A worker was lost that had been given up, or that no trial ever had."""
        del iteration, trials, info
        self._fence()
        number = trial.config["number"]
        if number in self._begun or number in self._retries_exhausted:
            end = self._note_worker_end(trial)
            self._fail(
                number, self._retries_exhausted.get(number) or self._describe_loss(trial, end)
            )
            return
        self._failures.stopped(number, self._describe_lost_starts(trial))
        if number in self._live | self._paused:
            self._interrupt(number)

    def interrupt_live(self) -> None:
        """Record that the trials which had not ended by now were interrupted."""
        for number in sorted(self._live | self._paused):
            self._interrupt(number)
        self.flush()

    def _interrupt(self, number: int) -> None:
        tags = {"stopped_by": "failures"} if self.abort_reason else STOPPED_BY_INTERRUPT
        self._begun.discard(number)
        self._live.discard(number)
        self._paused.discard(number)
        self._flush_last_report(number)
        self._writer.put(partial(self._books.record_interruption, number, tags))

    def _failed(self, number: int, failure: Failure) -> None:
        """A trial failed: by its own doing, or because its storage takes nothing from anybody."""
        if failure.may_be_the_trials_own(socket.gethostname()) and takes_checkpoints(
            self._paths, self._spec, number
        ):
            failure = failure.as_the_trials_own()
        if failure.kind in NOT_THE_TRIALS_DOING:
            self._failures.stopped(number, failure)
            self._interrupt(number)
        else:
            self._fail(number, failure)

    def _fail(self, number: int, failure: Failure) -> None:
        self._end(number, partial(self._books.failed, number, failure))
        self._failures.failed(number, failure)

    def _end(self, number: int, write: Callable[[], None]) -> None:
        self._signals.pop(number, None)
        self._begun.discard(number)
        self._deadlines.pop(number, None)
        self._live.discard(number)
        self._paused.discard(number)
        self._flush_last_report(number)
        self._writer.put(write)
        self.num_finished += 1

    def _flush_last_report(self, number: int) -> None:
        if (last := self._last.pop(number, None)) is not None:
            self._writer.put(last)

    def _note_worker_end(self, trial: Trial) -> WorkerEnd:
        """Write into a trial's log how its process ended, which could not do so itself."""
        end = self._end_of_worker(trial.get_pickled_error())
        log = self._paths.trial(trial.config["number"]) / TRIAL_LOG
        with contextlib.suppress(OSError), TrialLog(log) as file:
            said = f", and wrote last:\n{end.last_lines}" if end.last_lines else ""
            file.write(f"the trial's process ended{end.how and ' '}{end.how}{said}\n")
        return end

    def _describe_loss(self, trial: Trial, end: WorkerEnd) -> Failure:
        number = trial.config["number"]
        times = self._losses.in_a_row(number)
        often = f"{times} times in a row" if times > 1 else "once"
        how = f"; it ended {end.how}" if end.how else ""
        reason = f"lost: its process ended {often} without a new checkpoint{how}"
        return Failure("lost", reason, f"{trial.get_pickled_error()}\n{end.last_lines}".strip())

    def _describe_lost_starts(self, trial: Trial) -> Failure:
        times = self._lost_starts[trial.config["number"]] + 1
        end = self._end_of_worker(trial.get_pickled_error())
        how = f"; the last one ended {end.how}" if end.how else ""
        reason = f"lost: {times} workers in a row ended before they had begun with the trial{how}"
        return Failure("lost", reason, f"{trial.get_pickled_error()}\n{end.last_lines}".strip())

    def _newest_generation(self, number: int) -> int:
        saved = trial_store(self._paths, self._spec, number).generations()
        return saved[-1].number if saved else 0


def accumulation_note(trial: Trial, result: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be noted where a trial's batches are split into more micro-batches from
    now on, wherever it goes on next; nothing where that is as before.
    """
    train = trial.config["config"]["train"] if "accumulation" in result else {}
    if train.get("accumulation") == result.get("accumulation"):
        return {}
    train["accumulation"] = result["accumulation"]
    return {ACCUMULATION: int(result["accumulation"])}
