"""Bookkeeping: everything that is written down when something happens to a trial.

Ray Tune calls; the bookkeeper tells the recorder, then the ledger, then the view. A trial that
the ledger calls finished is never looked at again, so its end must already lie in the recorder's
durable queue by then; one that dies between the two is simply finished once more. Before anything
is written the lock is looked at: a driver that stood still may have been replaced meanwhile. What
must not live here: deciding what to try or when to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from sweeps.driver import control
from sweeps.early_stopping.exploit import without_unbegun
from sweeps.early_stopping.failures import (
    NOT_THE_TRIALS_DOING,
    Failure,
    Hopeless,
    Losses,
    SameFailures,
)
from sweeps.layout import TRIAL_CONFIG, SweepPaths
from sweeps.ledger.ledger import (
    ACCUMULATION,
    SIGNALS,
    Ending,
    Ledger,
    Report,
    TrialRecord,
)
from sweeps.ledger.view import Mutation
from sweeps.reconciliation.corrections import catch_up
from sweeps.reconciliation.facts import trial_facts
from sweeps.reconciliation.reconcile import STATUSES, end_of_training, missed
from sweeps.recording.curves import recorded
from sweeps.recording.tags import NOT_STOPPED, STOPPED_BY_INTERRUPT, end_tags, lineage_tags
from sweeps.results.running import Progress, View
from sweeps.spec.parameters import searched, trial_parameters
from sweeps.spec.spec import SpecError, SweepSpec, trial_yaml
from sweeps.stores import trial_store
from tracking.outbox_status import read_outbox
from tracking.recorder import Recorder
from trainable.files import make_directory
from trainable.history import Row, read_rows
from trainable.ray_adapter import OBJECTIVE

_NOT_KEPT = (
    "earlier",
    "rows",
    "metrics",
    "signals",
    "resolved",
    "step",
    "config",
    "iterations_since_restore",
    "time_since_restore",
    "time_this_iter_s",
    "time_total_s",
)
"""What leaves a result once it is written down. Tune keeps the last result of each trial for as
long as the sweep lasts, and statistics with two queues for each number in it."""


class Release(Callback):
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


class Bookkeeper(Callback):
    """Writes down what happens to trials.

    Args:
        spec: The sweep.
        paths: Where each trial's directory is.
        fence: Called right before anything is written; raises when another driver may run the
            sweep by now.
        on_step: Called once per turn of Tune's loop; the sweep's owner acts on signals there.
        on_end: Called with the record of each trial that has its end.
        node_died: Whether an actor was lost with the whole node that it ran on.
    """

    def __init__(
        self,
        spec: SweepSpec,
        paths: SweepPaths,
        ledger: Ledger,
        recorder: Recorder,
        view: View,
        *,
        fence: Callable[[], None],
        on_step: Callable[[], None],
        on_end: Callable[[TrialRecord], None],
        node_died: Callable[[Exception | None], bool] = lambda _: False,
    ) -> None:
        self._spec = spec
        self._paths = paths
        self._ledger = ledger
        self._recorder = recorder
        self._view = view
        self._fence = fence
        self._on_step = on_step
        self._on_end = on_end
        self._node_died = node_died
        self._live: set[int] = set()
        self._paused: set[int] = set()
        self._signals: dict[int, list[str]] = {}  # as they were noted last
        self._asked: dict[int, str | None] = {}
        self._losses = Losses(spec.failures.max_retries)
        self._given_up: dict[int, Failure] = {}
        self._failures = SameFailures(spec.failures.same_failure_limit)

    @property
    def hopeless(self) -> Hopeless | None:
        """Why more trials would only fail like those before, once that is so."""
        return self._failures.hopeless

    def stop(self, number: int, reason: str | None, *, live: bool) -> None:
        """Let a trial end for good: at its next step, or at once if nobody works on it.

        Args:
            reason: Why, for people; None: the scheduler never let it go on.
            live: Whether Tune has the trial.
        """
        self._fence()
        if live:
            self._asked[number] = reason
            control.order(self._paths, [number])
            return
        record = self._ledger.trial(number)
        if not record.finished:
            record = without_unbegun(record, self._paths)
            self._recorder.start(number, searched(record.params), {})
            self._stopped(number, reason, record.lineage)

    def refuse(self, number: int, error: SpecError) -> None:
        """Let a trial fail whose values are no configuration. It is not counted with the failures
        that end a sweep: what else is drawn may well be one.
        """
        self._fence()
        self._recorder.start(number, searched(self._ledger.trial(number).params), {})
        self._log_the_rest(number)  # of what it was before the spec changed
        self._end(number, "failed", reason=f"config: {error}")

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Ray pickles the Tuner into a file that is never read, and what is held here
        has no copy.
        """
        return {}

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        del iteration, trials, info
        self._on_step()

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Count the attempt, open the trial's run, and catch up on what a worker stored and could
        not tell before it was lost.
        """
        del iteration, trials, info
        self._fence()
        number, params = trial.config["number"], trial.config["params"]
        directory = self._paths.trial(number)
        make_directory(directory)
        config = self._spec.trial_config(number, params)
        (directory / TRIAL_CONFIG).write_text(trial_yaml(config), encoding="utf-8")
        self._losses.started(number, self._newest_generation(number))
        self._live.add(number)
        # Of halved micro-batches a tag tells: they are no change of what the trial was asked for.
        parameters = trial_parameters(config, params)
        if number in self._paused:
            self._paused.discard(number)
            if told := lineage_tags(self._ledger.trial(number)):
                self._recorder.start(number, parameters, told)
            self._view.promoted(number)
            return
        attempt = self._ledger.start(number)
        tags = {"gradsweep.attempts": str(attempt), **lineage_tags(self._ledger.trial(number))}
        self._recorder.start(number, parameters, tags if attempt == 1 else tags | NOT_STOPPED)
        if attempt > 1:
            known = trial_facts(
                self._paths,
                self._spec,
                self._ledger.trial(number),
                read_outbox(self._paths.outbox),
            )
            catch_up(missed(known), self._ledger, self._recorder)
        self._view.started(number, params, attempt)

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
        told = dict(result)
        for key in _NOT_KEPT:
            result.pop(key, None)
        self._record(trial, told)

    def _record(self, trial: Trial, result: Mapping[str, Any]) -> None:
        self._fence()
        number = trial.config["number"]
        if resolved := result.get("resolved"):
            self._recorder.tag(number, {f"gradsweep.{k}": v for k, v in resolved.items()})
        if damaged := result.get("set_aside"):
            self._recorder.tag(number, {"checkpoint.set_aside": "; ".join(damaged)})
            for sentence in damaged:
                self._view.warned(number, sentence)
        if "accumulation" in result:
            self._note_accumulation(trial, result["accumulation"])
        reports = [*result.get("earlier", ()), *([result] if OBJECTIVE in result else ())]
        if not reports:
            return
        others = self._spec.metrics[1:]
        self._ledger.report_all(
            number,
            [
                Report(
                    told["epoch"],
                    told["step"],
                    told[OBJECTIVE],
                    [told["metrics"][metric] for metric in others],
                )
                for told in reports
            ],
        )
        rows = [Row(*row) for told in reports for row in told["rows"]]
        self._recorder.log(number, recorded(rows, self._spec.tracking.every))
        looked = [told.get("signals", []) for told in reports if told["rows"]]  # else told again
        if looked:
            self._note_signals(number, looked[-1])
        for told in reports:
            self._view.reported(
                Progress(
                    number, trial.config["params"], told["epoch"], told["step"], told["metrics"]
                )
            )

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Give the trial the end that its last result tells; none means that a scheduler stopped
        it.
        """
        del iteration, trials, info
        number, last = trial.config["number"], trial.last_result
        match last.get("ending"):
            case "finished":
                reports = self._ledger.trial(number).reports
                ending, reason = end_of_training(reports, self._spec.metrics[0])
                self._end(number, ending, reason=reason)
                self._failures.passed()
            case "paused" if number not in self._asked:
                self._pause(number)
                self._failures.passed()
            case "failed" if last["failure"]["kind"] in NOT_THE_TRIALS_DOING:
                self._failures.stopped(number, Failure(**last["failure"]))
                self._interrupt(number)
            case "failed":
                self._fail(number, Failure(**last["failure"]))
            case "interrupted":
                self._interrupt(number)
            case "stopped" if number in self._given_up:
                self._fail(number, self._given_up[number])
            case "stopped" | "paused":
                self._stopped(number, self._asked[number])
            case _:
                self._end(number, "pruned")
                self._failures.passed()

    def on_trial_recover(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """A worker was lost, and Tune starts another one. One that is lost again and again without
        coming further only starts to be told that it is over; with its node any is lost.
        """
        del iteration, trials, info
        self._fence()
        if self._node_died(trial.get_pickled_error()):
            return
        number = trial.config["number"]
        if not self._losses.lost(number, self._newest_generation(number)):
            self._given_up[number] = self._describe_loss(trial)
            control.order(self._paths, [number])
            trial.max_failures = 0  # if it does not even live to hear it

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """A worker was lost that had been given up."""
        del iteration, trials, info
        self._fail(trial.config["number"], self._describe_loss(trial))

    def interrupt_live(self) -> None:
        """Record that the trials which had not ended by now were interrupted."""
        for number in sorted(self._live | self._paused):
            self._interrupt(number)

    def _pause(self, number: int) -> None:
        self._live.discard(number)
        self._paused.add(number)
        self._view.paused(number, self._ledger.trial(number).value)

    def _interrupt(self, number: int) -> None:
        self._fence()
        tags = {"stopped_by": "failures"} if self.hopeless else STOPPED_BY_INTERRUPT
        self._recorder.finish(number, "KILLED", tags)
        self._live.discard(number)
        self._paused.discard(number)
        self._view.ended(number, "interrupted", None, None)

    def _stopped(
        self, number: int, reason: str | None, lineage: Sequence[Mutation] | None = None
    ) -> None:
        # It may have been stopped between two reports; no later start would deliver the rest.
        self._log_the_rest(number)
        self._end(number, "pruned", reason=reason, lineage=lineage)

    def _fail(self, number: int, failure: Failure) -> None:
        self._log_the_rest(number)  # as above
        self._end(number, "failed", reason=failure.reason, traceback=failure.traceback)
        self._failures.failed(number, failure)

    def _log_the_rest(self, number: int) -> None:
        rows = read_rows(self._paths.trial(number))
        self._fence()
        self._recorder.log(number, recorded(rows, self._spec.tracking.every, ended=True))

    def _end(
        self,
        number: int,
        ending: Ending,
        *,
        reason: str | None = None,
        traceback: str | None = None,
        lineage: Sequence[Mutation] | None = None,
    ) -> None:
        record = replace(
            self._ledger.trial(number), state=ending, reason=reason, traceback=traceback
        )
        self._fence()
        self._recorder.finish(number, STATUSES[ending], end_tags(record, self._spec))
        record = self._ledger.finish(
            number, ending, reason=reason, traceback=traceback, lineage=lineage
        )
        self._live.discard(number)
        self._paused.discard(number)
        self._view.ended(number, ending, record.result, reason)
        self._on_end(record)

    def _describe_loss(self, trial: Trial) -> Failure:
        number = trial.config["number"]
        times = self._losses.in_a_row(number)
        often = f"{times} times in a row" if times > 1 else "once"
        reason = f"lost: its process ended {often} without a new checkpoint"
        return Failure("lost", reason, str(trial.get_pickled_error()))

    def _note_signals(self, number: int, signals: list[str]) -> None:
        if number not in self._signals:
            self._signals[number] = list(self._ledger.trial(number).signals)
        if signals != self._signals[number]:  # also when all is well again
            self._recorder.tag(number, {"health": "; ".join(signals)})
            self._ledger.note(number, SIGNALS, signals)
            self._signals[number] = signals

    def _note_accumulation(self, trial: Trial, accumulation: int) -> None:
        """A trial went on with smaller micro-batches; it does so wherever it goes on next."""
        train = trial.config["config"]["train"]
        if train["accumulation"] != accumulation:
            train["accumulation"] = accumulation
            number = trial.config["number"]
            self._ledger.note(number, ACCUMULATION, accumulation)
            self._recorder.tag(number, {f"gradsweep.{ACCUMULATION}": str(accumulation)})

    def _newest_generation(self, number: int) -> int:
        saved = trial_store(self._paths, self._spec, number).generations()
        return saved[-1].number if saved else 0
