"""Sweep a function of this script or notebook, in this process, one trial after another.

The search, the stopping rules, the ledger and the files are those of every sweep, so that each
command that reads a sweep reads this one. There is no Ray, no worker and no checkpoint: a trial
that was running when its process ended runs again from its start, with the same parameters.
A trial's reports are stored together with its end, so that no report of a lost run remains. What
must not live here: the parameters of a trial (`search`), and what `Sweep` offers (`sweep`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sweeps.api.objective import (
    ARGUMENT,
    RULE,
    FunctionRaised,
    Objective,
    Report,
    ReportRefused,
    defaults_of,
    digest_of,
    numbers_of,
    reports_of,
)
from sweeps.engine.provenance import provenance
from sweeps.errors import SearchChanged, UserError
from sweeps.ledger.attributes import Abort
from sweeps.ledger.ledger import Ledger, LedgerReport
from sweeps.ledger.sqlite import LedgerFile
from sweeps.ledger.trials import Ending, TrialRecord
from sweeps.ledger.warm_start import collect_warm_start, with_history
from sweeps.path_checks import check_writable
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.reconcile.failure_policy import Failure, RepeatedFailureDetector
from sweeps.reconcile.stop_criteria import active_stop_criterion
from sweeps.search.dry_run import dry_run
from sweeps.search.suggest import Suggester
from sweeps.spec.own_values import resolve_search
from sweeps.spec.resume_checks import Origin, code_changes
from sweeps.spec.revisions import changes, read_spec, write_spec
from sweeps.spec.sections import StopConfig
from sweeps.spec.spec import SweepSpec, trial_yaml
from sweeps.stopping.metric_values import as_value, stop_reason
from sweeps.stopping.rule import TrialStopper, judging, minimize_of
from sweeps.stores import check_owner, place_of
from sweeps.sweep_lock import SweepLock
from trainable.errors import NonFiniteMetric
from trainable.failures import failure_of
from trainable.store.metrics_file import FILE_NAME, Row, format_row
from trainable.store.regular_files import make_directory, replace_regular

_MAY_CHANGE = ("trials", "stop.", "tracking.")
FULL_DOOR = (
    "trials run in this process, one after another, from their start to their end; a task in a "
    "module of its own adds parallel trials, GPUs, checkpoints and exact resumption: see the "
    'guide "Your own loop"'
)


class Asked(NamedTuple):
    """A trial that `Sweep.ask` has begun.

    Examples:
        >>> asked = Sweep(name="asked", space={"lr": [0.1, 0.01]}, mode="min", trials=1).ask()
        >>> asked.number, asked.params["lr"]

    Attributes:
        number: The trial's number, from 0.
        params: The searched values, by the names of the space.
    """

    number: int
    params: dict[str, Any]


@dataclass
class _Opened:
    """An open sweep, whose lock this process holds."""

    lock: SweepLock
    ledger: Ledger
    suggester: Suggester
    stopper: TrialStopper | None
    failures: RepeatedFailureDetector
    unfinished: list[TrialRecord]
    num_trials: int
    seconds: float
    """For how long trials have run, those of earlier processes included."""
    running: dict[int, float] = field(default_factory=dict)
    """When each trial was begun that has not ended."""


class LightSweep:
    """Runs the trials of a function; without one, hands them out and is told their results."""

    def __init__(self, paths: SweepPaths, spec: SweepSpec, objective: Objective | None) -> None:
        rule = spec.early_stopping.rule
        if rule.pausing(epochs=spec.budget.reports, minimize=minimize_of(spec), num_trials=1):
            raise UserError(
                f"early_stopping.scheduler is {rule.name}, which pauses trials and resumes them "
                "from checkpoints; a function has none; write asha, hyperband or median"
            )
        if spec.early_stopping.exempt:
            raise UserError(
                f"early_stopping.exempt is {spec.early_stopping.exempt:g}; a function in this "
                "process has no exempt trials; leave it out"
            )
        self._paths, self._objective = paths, objective
        self._name = "the caller" if objective is None else spec.task.name.partition(":")[2]
        self._spec = _resolved(spec, objective)
        self._now: _Opened | None = None
        self._release: Callable[[], object] = lambda: None

    def run(self, show: Callable[[], None]) -> Exception | None:
        """Run the trials that are left, and call `show` after each; return what ended the sweep.

        That is the function's own error, if several trials failed alike. The caller raises it, so
        that its traceback has the function's frames and few others.
        """
        if self._objective is None:
            raise UserError(
                "there is no function to run; give one as the first argument, or call ask() and "
                "tell()"
            )
        self.close()  # what was asked for and not told runs again
        try:
            next_look = time.monotonic()
            while (asked := self.ask()) is not None:
                if (error := self._run_trial(asked)) is not None:
                    return error
                if (began := time.monotonic()) >= next_look:
                    show()
                    now = time.monotonic()
                    next_look = now + max(_LEAST_REST, _REST * (now - began))
        finally:
            self.close()
        return None

    def ask(self) -> Asked | None:
        """Begin the next trial; None: there is none left."""
        now = self._open()
        now.lock.check()
        trial = self._unfinished(now) or self._new_trial(now)
        if trial is None:
            if not now.running:
                self.close()
            return None
        directory = self._paths.trial(trial.number)
        make_directory(directory)
        config = self._spec.trial_config(trial.seed, trial.params)
        replace_regular(directory / TRIAL_CONFIG, trial_yaml(config).encode())
        now.running[trial.number] = time.monotonic()
        searched = {key.removeprefix(ARGUMENT) for key in trial.params}
        return Asked(
            trial.number, {k: v for k, v in config.task.arguments.items() if k in searched}
        )

    def tell(self, number: int, result: Report | None, failure: str | None) -> None:
        """Store the end of a trial that `ask` has begun."""
        if self._now is None or number not in self._now.running:
            raise UserError(
                f"trial {number} is not running; tell() takes one result of each trial that ask() "
                "has returned; name a trial that has not ended"
            )
        if (result is None) == (failure is None):
            given = "neither a result nor" if failure is None else "both a result and"
            raise UserError(
                f"tell() was given {given} a failure for "
                f"trial {number}; it takes one of them; write tell(trial, 0.5), or "
                "tell(trial, failure='out of memory')"
            )
        if result is None:
            self._end(number, [], "failed", f"error: {failure}")
            return
        rows = [self._row([], result)]
        self._end(number, rows, *self._judge(number, rows))

    def close(self) -> None:
        """Release the sweep's lock; trials that were begun stay unfinished."""
        self._release()
        self._now = None

    @property
    def _opened(self) -> _Opened:
        assert self._now is not None, "ask comes first"
        return self._now

    def _open(self) -> _Opened:
        """Open the sweep, or create it."""
        if self._now is not None:
            return self._now
        paths = self._paths
        check_writable(paths.root, "root")
        check_owner(paths.directory)
        self._spec = spec = with_history(paths, self._spec)[0]
        warm = collect_warm_start(paths.root, spec)
        if not paths.exists():
            dry_run(spec, warm)
        lock = SweepLock(paths.lock)
        lock.acquire()
        # Also when this object is no longer used, and when the process ends by itself.
        self._release = weakref.finalize(self, lock.release)
        try:
            if paths.exists():
                _check_unchanged(paths, spec)
                ledger = Ledger.open(paths.ledger)
            else:
                LedgerFile(paths.ledger).remove_incomplete(paths.spec)
                ledger = Ledger.create(
                    paths.ledger,
                    mode=spec.mode,
                    sweep_id=uuid.uuid4().hex,
                    select=spec.select,
                    limits=spec.limits,
                )
                if warm.summary:
                    ledger.store_warm_start(warm)
            self._store_origin(ledger)
            # The commit point: a sweep exists once this file does, so its ledger comes first.
            write_spec(paths.spec, spec)
            self._now = self._session(lock, ledger)
        except BaseException:  # also on Ctrl-C: the next process needs the lock
            self._release()
            raise
        return self._now

    def _session(self, lock: SweepLock, ledger: Ledger) -> _Opened:
        spec, trials = self._spec, ledger.trials()
        stopper = spec.early_stopping.rule.make_stopper(
            epochs=spec.budget.reports, minimize=minimize_of(spec)
        )
        if stopper is not None:
            stopper = judging(stopper, spec)
            for trial in trials:
                for epoch, value in sorted(trial.compared_reports.items()):
                    stopper.stops(trial.number, epoch, value)
        return _Opened(
            lock,
            ledger,
            Suggester(spec, ledger),
            stopper,
            RepeatedFailureDetector(spec.failures.same_failure_limit, spec.space),
            [one for one in trials if not one.finished],
            len(trials),
            ledger.seconds,
        )

    def _store_origin(self, ledger: Ledger) -> None:
        """Store who runs the sweep, and check that the function is that of its trials."""
        now, before = Origin(digest_of(self._name, self._objective)), ledger.origin
        has_results = any(trial.reports for trial in ledger.trials())
        if has_results and (changed := list(code_changes(before, now))):
            raise SearchChanged(
                f"the function has changed since trials of sweep '{self._paths.name}' ran "
                f"({'; '.join(changed)}); trials before and after could not be compared; undo "
                f"the change, or give the sweep another name, such as name='{self._paths.name}_2'"
            )
        ledger.store_origin(now)
        ledger.add_attempt({**provenance(), **now.tags()})
        ledger.store_run_from({**place_of(self._paths), "code": os.getcwd()})

    def _unfinished(self, now: _Opened) -> TrialRecord | None:
        """Start a trial again that an earlier process has left; None: there is none left."""
        if not now.unfinished:
            return None
        trial = now.unfinished.pop(0)
        now.ledger.start(trial.number)
        return trial

    def _new_trial(self, now: _Opened) -> TrialRecord | None:
        """Add the next trial of the search; None: the sweep has enough, or stops."""
        spec, ledger = self._spec, now.ledger
        if now.num_trials >= spec.num_trials:
            return None
        watches = spec.stop != StopConfig()
        if watches and active_stop_criterion(spec, ledger.trials(), now.seconds):
            return None
        suggestion = now.suggester.propose(now.num_trials)
        now.num_trials += 1
        return ledger.add(suggestion, started=True)

    def _run_trial(self, asked: Asked) -> Exception | None:
        """Run the function with a trial's parameters, and store its end; see `run`."""
        assert self._objective is not None
        number, rows = asked.number, list[Row]()
        ending, reason = _GOES_ON
        try:
            with contextlib.closing(reports_of(self._objective, asked.params)) as reports:
                for given in reports:
                    rows.append(self._row(rows, given))
                    ending, reason = self._judge(number, rows)
                    if (ending, reason) != _GOES_ON or len(rows) >= self._spec.budget.reports:
                        break
        except FunctionRaised as raised:
            return self._fail(number, rows, raised.error)
        if not rows:
            raise ReportRefused(f"{self._name} ended and has yielded nothing; {RULE}")
        self._end(number, rows, ending, reason)
        return None

    def _row(self, earlier: Sequence[Row], given: object) -> Row:
        """Return a report as a row of the trial's curve."""
        spec, number = self._spec, len(earlier) + 1
        values = numbers_of(self._name, given, spec.reported)
        first = spec.metrics[0]
        known = [row.metrics[f"best/{first}"] for row in earlier[-1:]]
        better = min if spec.modes[0] == "min" else max
        finite = filter(math.isfinite, [*known, values[first]])
        values[f"best/{first}"] = better(finite, default=math.nan)
        at = dict.fromkeys(("epoch", spec.budget.report_word), float(number))
        return Row(number, int(time.time() * 1000), values | at)

    def _judge(self, number: int, rows: Sequence[Row]) -> tuple[Ending, str | None]:
        """Return how a trial ends after its last report, and why."""
        spec, stopper = self._spec, self._opened.stopper
        values = _values(rows[-1], spec.reported)
        for metric, value in zip(spec.reported, values, strict=True):
            if not math.isfinite(value):
                return "failed", (
                    f"{NonFiniteMetric.kind}: {metric} is {value} in report {len(rows)}; a trial "
                    "needs a finite value; return one, or raise an error that says what went wrong"
                )
        why = stopper and stopper.stops(number, len(rows), as_value(values))
        if spec.patience is not None:
            first = spec.metrics[0]
            curve = {row.step: row.metrics[first] for row in rows}
            if patience := spec.patience.reason(curve, first):
                return "complete", patience
        if why and len(rows) < spec.budget.reports:
            rule, word = spec.early_stopping.rule.name, spec.budget.report_word
            return "pruned", stop_reason(rule, f"{word} {len(rows)}", spec.reported, values, why)
        return _GOES_ON

    def _fail(self, number: int, rows: Sequence[Row], error: Exception) -> Exception | None:
        """Store that the function raised; return its error if several trials failed alike."""
        failure, now = Failure(**failure_of(error)), self._opened
        self._end(number, rows, "failed", failure.reason, failure.traceback)
        now.failures.failed(number, failure)
        if (cause := now.failures.abort_reason) is None:
            return None
        now.ledger.store_abort(Abort(cause.key, cause.cause, number, failure.kind))
        error.add_note(
            f"{cause.cause}; the sweep has stopped: correct the function, and run it again"
        )
        return error

    def _end(
        self,
        number: int,
        rows: Sequence[Row],
        ending: Ending,
        reason: str | None = None,
        traceback: str | None = None,
    ) -> None:
        """Store a trial's reports and its end, in one transaction."""
        now, metrics = self._opened, self._spec.reported
        seconds = time.monotonic() - now.running[number]
        now.lock.check()
        content = b"".join(map(format_row, rows))
        replace_regular(self._paths.trial(number) / FILE_NAME, content, durable=True)
        reports = []
        for row in rows:
            first, *others = _values(row, metrics)
            reports.append(LedgerReport(row.step, row.step, first, others))

        def store() -> None:
            now.ledger.report_all(number, reports)
            now.ledger.finish(number, ending, reason=reason, traceback=traceback, seconds=seconds)
            now.ledger.store_seconds(now.seconds + seconds)

        now.ledger.transaction(store)
        now.seconds += seconds
        del now.running[number]
        if ending != "failed":
            now.failures.passed()


_LEAST_REST, _REST = 0.5, 20
"""Between two looks at the sweep: so many seconds, and so many times what a look takes."""
_GOES_ON: tuple[Ending, None] = ("complete", None)
"""What is known of a trial that nothing has ended: at its last report it is complete."""


def _values(row: Row, metrics: Sequence[str]) -> tuple[float, ...]:
    return tuple(row.metrics[metric] for metric in metrics)


def _resolved(spec: SweepSpec, objective: Objective | None) -> SweepSpec:
    """Return the spec with the function's defaults as the first point, if it has all of them."""
    if spec.search.try_first != "defaults":
        return spec
    defaults = defaults_of(objective)
    if not {key.removeprefix(ARGUMENT) for key in spec.space} <= defaults.keys():
        none = spec.search.model_copy(update={"try_first": []})
        return spec.model_copy(update={"search": none})
    resolved, cautions = resolve_search(spec, defaults)
    for caution in cautions:
        warnings.warn(caution, stacklevel=4)
    return resolved


def _check_unchanged(paths: SweepPaths, spec: SweepSpec) -> None:
    """Refuse another sweep of the same name; trials may be added, and stop criteria change."""
    differing = {
        key: values
        for key, values in changes(read_spec(paths.spec).spec, spec).items()
        if not key.startswith(_MAY_CHANGE)
    }
    if differing:
        shown = "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in differing.items())
        raise SearchChanged(
            f"sweep '{paths.name}' exists, with other keys ({shown}); the sweep of a function "
            "keeps its keys but trials and stop; undo the change, or give the sweep another "
            f"name, such as name='{paths.name}_2'"
        )
