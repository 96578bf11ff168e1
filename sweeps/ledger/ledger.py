"""Store a sweep: its identity and drivers, and its trials with their values, states and attempts.

One Optuna study is the only record. A trial that is RUNNING in the study is unfinished, whether
or not a process is working on it. It keeps its number and parameters until it ends: complete,
pruned or failed. What must not live here: connections and transactions (`storage`), Ray, files of
training runs, tracking.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeps.errors import LedgerError
from sweeps.ledger.attributes import (
    ABORT,
    ACCUMULATION,
    ATTEMPT,
    CONSTRAINTS,
    DEVICES,
    ENDED,
    EXEMPT,
    GENERATION,
    LIMITED,
    LINEAGE,
    LOST_WORKERS,
    MOST_LOST_WORKERS,
    PLACE,
    PLAN,
    PRIORS,
    PROMOTED,
    REPEATS,
    REPORT,
    RUN_FROM,
    SECONDS,
    SELECT,
    SERIES,
    SIGNALS,
    WARM_START,
    WOULD_STOP,
    Abort,
    PbtPerturbation,
    Role,
    abort_in,
    attempts_in,
    is_of_search,
    limits_in,
    repeats_in,
    reports_in,
    role_attributes,
    trial_fields,
)
from sweeps.ledger.failed_attempts import FAILED_ATTEMPTS, REOPENED, FailedAttempt, Reopened
from sweeps.ledger.over_seeds import Repeats, with_seeds
from sweeps.ledger.ranking import front, is_finite, value_of
from sweeps.ledger.reasons import clipped_reason, clipped_traceback
from sweeps.ledger.sqlite import LedgerFile
from sweeps.ledger.storage import StudyStorage
from sweeps.ledger.trials import NO_LIMITS, STATES, Ending, TrialRecord
from sweeps.ledger.warm_start import WarmStart
from sweeps.spec.resume_checks import Origin
from sweeps.spec.sections import Select
from sweeps.statistics.feasibility import Limits
from trainable.config import Mode

_P = ParamSpec("_P")
_R = TypeVar("_R", bound="StudyRecord")
_T = TypeVar("_T")


def in_transaction(
    method: Callable[Concatenate[_R, _P], _T],
) -> Callable[Concatenate[_R, _P], _T]:
    """Decorate a method that writes: it runs in one transaction, with one sync of the disk.

    If the process dies within the method, nothing is stored. Storage errors become `LedgerError`.
    """

    @functools.wraps(method)
    def wrapped(self: _R, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.transaction(lambda: method(self, *args, **kwargs))

    return wrapped


class StudyRecord:
    """What a ledger stores of its sweep as a whole."""

    def __init__(self, location: LedgerFile, storage: StudyStorage) -> None:
        self.location = location
        self._mutex = threading.RLock()
        self._storage = storage

    def transaction(self, work: Callable[[], _T]) -> _T:
        """Run `work` in one transaction, with one sync of the disk."""
        with self._mutex:
            return self._storage.transact(work)

    @property
    def sweep_id(self) -> str:
        """The sweep's identity, by which tracking finds its runs again."""
        return str(self._storage.attributes["sweep_id"])

    @property
    def origin(self) -> Origin:
        """The code, data and samples from which the sweep's trials ran."""
        attributes = self._storage.attributes
        return Origin(**attributes.get("origin", {}), samples=attributes.get("samples", {}))

    @in_transaction
    def store_origin(self, origin: Origin) -> None:
        """Store the code, data and samples from which trials run from now on."""
        before = self.origin
        if (origin.code, origin.data) != (before.code, before.data):
            self._storage.set_study_attribute(
                "origin", {"code": dict(origin.code), "data": origin.data}
            )
        if origin.samples != before.samples:  # separate: databases bound the length of a value
            self._storage.set_study_attribute("samples", dict(origin.samples))

    @property
    def run_from(self) -> dict[str, Any]:
        """Where the sweep and its code lay for the last driver; see `attributes.RUN_FROM`."""
        return dict(self._storage.attributes.get(RUN_FROM, {}))

    @in_transaction
    def store_run_from(self, run_from: Mapping[str, Any]) -> None:
        """Store where the sweep and its code lie now."""
        if run_from != self.run_from:
            self._storage.set_study_attribute(RUN_FROM, dict(run_from))

    @property
    def attempts(self) -> list[dict[str, str]]:
        """The host, command and versions of each driver of the sweep, as tags."""
        return attempts_in(self._storage.attributes)

    @in_transaction
    def add_attempt(self, tags: Mapping[str, str]) -> None:
        """Store the host, command and versions of one more driver of the sweep."""
        number = len(self.attempts) + 1
        self._storage.set_study_attribute(f"{ATTEMPT}{number}", dict(tags))
        if self.abort is not None:  # the earlier driver's
            self._storage.set_study_attribute(ABORT, None)

    @property
    def abort(self) -> Abort | None:
        """Why the last driver stopped the sweep by itself; None if it did not."""
        return abort_in(self._storage.attributes)

    @in_transaction
    def store_abort(self, abort: Abort) -> None:
        """Store why this driver stops the sweep by itself; the next driver clears it."""
        why = clipped_reason(abort.why)
        self._storage.set_study_attribute(ABORT, [abort.key, why, abort.trial, abort.kind])

    @property
    def series(self) -> dict[str, Any] | None:
        """The last request for extra trials that are added in turns; None: none was made."""
        return self._storage.attributes.get(SERIES)

    @in_transaction
    def store_series(self, request: Mapping[str, Any]) -> None:
        """Store a request for extra trials; an earlier one is replaced."""
        self._storage.set_study_attribute(SERIES, dict(request))

    @property
    def num_published(self) -> int:
        """How many trials the sweep had when its best trial was last published; 0 before."""
        return int(self._storage.attributes.get("concluded", 0))

    @in_transaction
    def mark_published(self) -> None:
        """Record that the outbox holds everything about the trials so far."""
        self._storage.set_study_attribute("concluded", len(self._storage.trials))

    @property
    def seconds(self) -> float:
        """For how many seconds all drivers together have run the sweep's trials."""
        return float(self._storage.attributes.get(SECONDS, 0.0))

    @in_transaction
    def store_seconds(self, seconds: float) -> None:
        """Store for how many seconds the sweep's trials have been run."""
        self._storage.set_study_attribute(SECONDS, round(seconds, 3))

    @in_transaction
    def store_plan(self, plan: Mapping[str, Any]) -> None:
        """Store what the sweep is expected to take.

        A resume keeps the plan with which trials began, unless it changes what was planned.
        """
        before = self._storage.attributes.get(PLAN) or {}
        if any(before.get(key) != plan[key] for key in ("trials", "epochs", "rule")):
            self._storage.set_study_attribute(PLAN, dict(plan))

    @property
    def warm_start(self) -> WarmStart:
        """The trials of earlier sweeps that the sampler learns from, fixed at creation."""
        return WarmStart.from_data(self._storage.system_attribute(WARM_START))

    @in_transaction
    def store_warm_start(self, warm: WarmStart) -> None:
        """Store which trials of earlier sweeps a new sweep's sampler learns from."""
        self._storage.set_system_attribute(WARM_START, warm.to_data())


ENDINGS: dict[str, TrialState] = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


@dataclass(frozen=True)
class Suggestion:
    """A point of a search space."""

    params: Mapping[str, Any]
    distributions: Mapping[str, BaseDistribution]
    """The distribution of each parameter."""
    system_attrs: Mapping[str, Any] = field(default_factory=dict)
    """The sampler's own state of this trial, stored as the trial's system attributes."""
    priors: str | None = None
    """The digest of the priors around which it was drawn; None: around none."""


class LedgerReport(NamedTuple):
    """The metrics that a trial reports after an epoch.

    Attributes:
        value: The (first) metric.
        seconds: For how long workers have trained the trial; None: unknown.
    """

    epoch: int
    step: int
    value: float
    others: Sequence[float] = ()
    seconds: float | None = None


class Ledger(StudyRecord):
    """A sweep's trials in an Optuna study.

    Every method may raise `LedgerBusy` when another process keeps the database locked, and
    `LedgerError` when the database cannot be used. Methods that write may raise `LockLost`:
    another driver has acquired the sweep's lock. Methods may be called from any thread; a mutex
    serializes them.
    """

    def __init__(self, location: LedgerFile, storage: StudyStorage) -> None:
        super().__init__(location, storage)
        self.directions = storage.directions
        """Whether less or more of each metric is better, as Optuna's type."""
        self.minimizes = tuple(one == StudyDirection.MINIMIZE for one in self.directions)
        """For each metric, whether less is better."""
        self.select: Select = storage.attributes.get(SELECT, "checkpoint")
        """What the values of the sweep's trials are; see `ranking.value_of`."""
        self.repeats = repeats_in(storage.attributes)
        """How many seeds each configuration gets; None: one."""
        self.limits = limits_in(storage.attributes, len(self.minimizes))
        """The limits on reported metrics by which its trials are feasible or not."""
        self.earlier_budgets: Collection[int] = ()
        """The reports of a full training under each revision of the spec. The driver sets it: a
        trial that is complete by one of them may be short for a later one."""
        trials = self.frozen_trials()
        # A trial that was reopened has given its number back, but later ends keep theirs.
        self._ends = max(
            sum(trial.state.is_finished() for trial in trials),
            *(int(trial.user_attrs.get(ENDED, 0)) for trial in trials),
            0,
        )
        self.trial_resources: Callable[[Mapping[str, Any]], tuple[float, float]] | None = None
        """Returns CPUs and GPUs of a trial that this process trains, by its parameters; None: the
        seconds of trials on devices are not counted."""

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        mode: Mode | Sequence[Mode],
        sweep_id: str,
        select: Select = "checkpoint",
        repeats: Repeats | None = None,
        limits: Limits = NO_LIMITS,
    ) -> Ledger:
        """Create an empty ledger."""
        modes = [mode] if isinstance(mode, str) else mode
        directions = [
            StudyDirection.MINIMIZE if one == "min" else StudyDirection.MAXIMIZE for one in modes
        ]
        location = LedgerFile(path)
        if path.exists() and location.num_trials() is not None:
            raise LedgerError(f"{location} already holds a ledger")
        storage = StudyStorage(location)

        def create() -> None:
            storage.create(directions)
            storage.set_study_attribute("sweep_id", sweep_id)
            if select != "checkpoint":
                storage.set_study_attribute(SELECT, select)
            if repeats is not None:
                storage.set_study_attribute(REPEATS, list(repeats))
            if limits:
                storage.set_study_attribute(CONSTRAINTS, limits.each)

        storage.transact(create)
        return cls(location, storage)

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Open an existing ledger. A damaged ledger stays unchanged."""
        location = LedgerFile(path)
        if location.num_trials() is None:
            raise location.damaged("it holds no study")
        with location.decoding():
            return cls(location, StudyStorage(location))

    @property
    def minimize(self) -> bool:
        """Whether less of the (first) metric is better."""
        return self.minimizes[0]

    def trials(self) -> list[TrialRecord]:
        """Return all trials, in the order of their numbers."""
        return with_seeds([*map(self._record, self.frozen_trials())], self.repeats)

    def frozen_trials(self) -> list[FrozenTrial]:
        """Return all trials as Optuna's objects, in the order of their numbers.

        A trial that has not changed since the last call is the same object.
        """
        with self._mutex:
            return self._storage.trials

    def trial(self, number: int) -> TrialRecord:
        """Return one trial by itself, with the value of its own training."""
        with self._mutex:
            return self._record(self._storage.trial(number))

    def front(self) -> list[TrialRecord]:
        """Return the best trial, or with several metrics the Pareto front; see `ranking.front`."""
        return front(self.trials(), self.minimizes)

    @in_transaction
    def store_limits(self, limits: Limits) -> None:
        """Store the limits of an edited spec, by which all trials are judged from now on."""
        if limits != self.limits:
            self._storage.set_study_attribute(CONSTRAINTS, limits.each)
            self.limits = limits

    def best(self) -> TrialRecord | None:
        """Return the best trial; None if there is none, or if the Pareto front has several."""
        best = self.front()
        return best[0] if len(best) == 1 else None

    def _reports(self, trial: FrozenTrial) -> Mapping[int, Sequence[float]]:
        """Return the value of each reported metric after each reported epoch."""
        if len(self.minimizes) > 1 or self.limits:
            several = reports_in(trial.user_attrs)
            if several or len(self.minimizes) > 1:
                return several
        return {epoch: (value,) for epoch, value in sorted(trial.intermediate_values.items())}

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        several = self._reports(trial)
        reports = {epoch: values[0] for epoch, values in several.items()}
        values: tuple[float | None, ...]
        values = value_of(several, minimize=self.minimize, select=self.select) or (None,)
        values = values[: len(self.minimizes)]
        return TrialRecord(
            number=trial.number,
            state=STATES[trial.state.name],
            reports=reports,
            all_reports={e: tuple(one) for e, one in several.items() if len(one) > 1},
            value=values[0],
            others=tuple(value for value in values[1:] if value is not None),
            limits=self.limits,
            select=self.select,
            **trial_fields(dict(trial.params), trial.user_attrs),
        )

    @in_transaction
    def add(
        self,
        suggestion: Suggestion,
        *,
        exempt: bool = False,
        place: int | None = None,
        started: bool = False,
    ) -> TrialRecord:
        """Create the next trial of the search, which is the first seed of a configuration.

        With `started`, its first attempt is counted, as `start` does.
        """
        first = role_attributes("search", None, 0) if self.repeats is not None else {}
        if started:
            first |= {"attempts": 1, "progress": {"started_ms": _now_ms()}}
        known = {EXEMPT: exempt or None, PLACE: place, PRIORS: suggestion.priors}
        number = self._storage.add_trial(
            suggestion.params,
            suggestion.distributions,
            first | {key: one for key, one in known.items() if one is not None},
            suggestion.system_attrs,
        )
        return self.trial(number)

    @in_transaction
    def add_extra(
        self, role: Role, origin: int, seed_index: int | None = None, *, split: bool = False
    ) -> TrialRecord:
        """Create a trial that trains the point of another trial.

        Optuna never changes a trial that has ended: a pruned trial stays pruned.
        """
        known = self._storage.trial(origin)
        # The number of micro-batches with which it fits into memory decides the bits, too.
        keys = [ACCUMULATION, PLACE]
        if role == "repeat":  # where it would have been stopped, its configuration counts as ended
            keys += [EXEMPT, WOULD_STOP]
        kept = {key: known.user_attrs[key] for key in keys if key in known.user_attrs}
        attributes = {**role_attributes(role, origin, seed_index, split=split), **kept}
        number = self._storage.add_trial(known.params, known.distributions, attributes, {})
        return self.trial(number)

    @in_transaction
    def promote(self, number: int) -> TrialRecord:
        """Store that a trial may leave the rung at which it waits; until it reports, it runs."""
        last = max(self._reports(self._storage.trial(number)))
        self._storage.set_attribute(number, PROMOTED, last)
        return self.trial(number)

    @in_transaction
    def complete(self, number: int, suggestion: Suggestion) -> TrialRecord:
        """Store the parameters that a trial lacks."""
        known = self._storage.trial(number).params
        for name, distribution in suggestion.distributions.items():
            if name not in known:
                self._storage.set_param(number, name, suggestion.params[name], distribution)
        return self.trial(number)

    @in_transaction
    def start(self, number: int) -> int:
        """Increment a trial's number of attempts."""
        trial = self._storage.trial(number)
        attempts = int(trial.user_attrs.get("attempts", 0)) + 1
        self._storage.set_attribute(number, "attempts", attempts)
        if attempts == 1:
            self._store_progress(trial, started_ms=_now_ms())
        return attempts

    @in_transaction
    def store_trial_seconds(self, number: int, seconds: float) -> None:
        """Store for how long workers have trained a trial; an ended one stays unchanged."""
        trial = self._storage.trial(number)
        if not trial.state.is_finished():
            self._store_progress(trial, seconds=round(seconds, 3))

    def report(
        self, number: int, *, epoch: int, step: int, value: float, others: Sequence[float] = ()
    ) -> None:
        """Record the metrics after an epoch. A repeated epoch keeps its first report."""
        self.report_all(number, [LedgerReport(epoch, step, value, others)])

    @in_transaction
    def report_all(self, number: int, reports: Iterable[LedgerReport]) -> None:
        """Record several reports in one transaction, or none of them."""
        for report in reports:
            self._report(number, *report)

    def _report(
        self,
        number: int,
        epoch: int,
        step: int,
        value: float,
        others: Sequence[float],
        seconds: float | None,
    ) -> None:
        trial = self._storage.trial(number)
        known = self._reports(trial)
        if epoch in known or trial.state.is_finished():
            return
        progress: dict[str, Any] = {"step": step, "epoch": epoch}
        before = [values[0] for values in known.values() if is_finite(values)]
        # NaN and infinity are never best. The earlier of equal reports stays the best.
        is_best = is_finite((value, *others)) and all(
            value < other if self.minimize else value > other for other in before
        )
        if is_best or self.select == "final":
            progress |= {"best_step": step, "best_epoch": epoch, **self._limited(value, *others)}
        if seconds is not None:
            progress["seconds"] = round(seconds, 3)
        self._store_progress(trial, **progress)
        if others:
            self._storage.set_attribute(number, f"{REPORT}{epoch}", [value, *others])
        if len(self.minimizes) == 1:
            self._storage.add_value(number, epoch, value)

    def _limited(self, *values: float) -> dict[str, list[float]]:
        """Return the entry of a trial's progress with the metrics that only have limits."""
        only_limited = list(values[len(self.minimizes) :])
        return {LIMITED: only_limited} if only_limited else {}

    def _store_progress(self, trial: FrozenTrial, **changed: Any) -> None:
        """Change some entries of a trial's progress."""
        before = trial.user_attrs.get("progress", {})
        progress = {**before, **changed}
        if "seconds" in changed and self.trial_resources is not None:
            cpu, gpu = before.get(DEVICES, (0.0, 0.0))
            # Only what came since the last writing: earlier attempts may have had other resources.
            more = changed["seconds"] - before.get("seconds", 0.0)
            cpus, gpus = self.trial_resources(trial.params)
            progress[DEVICES] = [
                round(value, 3) for value in (cpu + more * cpus, gpu + more * gpus)
            ]
        self._storage.set_attribute(trial.number, "progress", progress)

    @in_transaction
    def set_attr(self, number: int, key: str, value: Any) -> None:
        """Store an attribute of a trial that is neither a parameter nor a result."""
        self._storage.set_attribute(number, key, value)

    @in_transaction
    def add_lost_worker(self, number: int, sentence: str) -> None:
        """Store why a worker of a trial was lost; only the last of them are kept."""
        before = self._storage.trial(number).user_attrs.get(LOST_WORKERS, ())
        kept = [*before, sentence][-MOST_LOST_WORKERS:]
        self._storage.set_attribute(number, LOST_WORKERS, kept)

    @property
    def generation(self) -> int:
        """The epoch of the last PBT decision; 0 before the first."""
        return int(self._storage.attributes.get(GENERATION, 0))

    @in_transaction
    def mutate(self, epoch: int, mutations: Mapping[int, PbtPerturbation]) -> None:
        """Store PBT's decision at an epoch in one transaction."""
        for number, mutation in mutations.items():
            lineage = [*self.trial(number).lineage, mutation]
            self._storage.set_attribute(number, LINEAGE, lineage)
        self._storage.set_study_attribute(GENERATION, epoch)

    @in_transaction
    def take_back_mutation(self, number: int) -> None:
        """Remove a member's last mutation, because the donor's checkpoint is gone.

        The member then resumes unchanged.
        """
        lineage = self.trial(number).lineage[:-1]
        self._storage.set_attribute(number, LINEAGE, lineage)

    @in_transaction
    def finish(
        self,
        number: int,
        ending: Ending,
        *,
        reason: str | None = None,
        traceback: str | None = None,
        lineage: Sequence[PbtPerturbation] | None = None,
        seconds: float | None = None,
    ) -> TrialRecord:
        """Record how a trial ended; a second call changes nothing.

        A complete trial's value is that of `value_of`. With several metrics, all values come from
        one report.
        """
        record = self.trial(number)
        if record.finished:
            return record
        if lineage is not None and tuple(lineage) != record.lineage:
            self._storage.set_attribute(number, LINEAGE, list(lineage))
        if reason is not None:
            self._storage.set_attribute(number, "reason", clipped_reason(reason))
        if traceback is not None:
            self._storage.set_attribute(number, "traceback", clipped_traceback(traceback))
        self._ends += 1  # a transaction that fails skips a number
        self._storage.set_attribute(number, ENDED, self._ends)
        trained = {} if seconds is None else {"seconds": round(seconds, 3)}
        self._store_progress(self._storage.trial(number), ended_ms=_now_ms(), **trained)
        several = len(self.minimizes) > 1
        values = _optuna_values(record, ending, several=several)
        self._storage.end_trial(number, ENDINGS[ending], values)
        return self.trial(number)

    @in_transaction
    def reopen(
        self,
        number: int,
        attempt: FailedAttempt,
        reopened: Reopened,
        *,
        steps: Mapping[int, int],
    ) -> TrialRecord:
        """Make a failed trial unfinished again; a trial in another state stays unchanged.

        Reports after the one from which it continues are deleted: they are made again, perhaps by
        other code. Number, parameters, attempts and training time stay.
        """
        trial, last = self._storage.trial(number), attempt.continued_at
        if trial.state != TrialState.FAIL:
            return self._record(trial)
        later = [f"{REPORT}{epoch}" for epoch in reports_in(trial.user_attrs) if epoch > last]
        drop = [
            "reason",
            "traceback",
            ENDED,
            PROMOTED,
            *later,
            *([ACCUMULATION] if reopened.fresh else []),
        ]
        would_stop, _ = trial.user_attrs.get(WOULD_STOP, (0, ""))
        if would_stop > last and is_of_search(trial.user_attrs):  # a further seed has its origin's
            drop.append(WOULD_STOP)
        self._storage.reopen_trial(number, last_report=last, drop=drop)
        before = trial.user_attrs.get("progress", {})
        history = [*trial.user_attrs.get(FAILED_ATTEMPTS, ()), attempt]
        attributes = {
            "progress": {
                **{
                    key: before[key] for key in ("started_ms", "seconds", DEVICES) if key in before
                },
                **self._progress_at(number, steps),
            },
            FAILED_ATTEMPTS: history,
            REOPENED: reopened,
            **({SIGNALS: []} if SIGNALS in trial.user_attrs else {}),
        }
        for key, value in attributes.items():
            self._storage.set_attribute(number, key, value)
        self._storage.set_study_attribute("concluded", 0)
        return self.trial(number)

    @in_transaction
    def store_reopened(self, number: int) -> None:
        """Store that a reopened trial may train: see `Reopened`."""
        self._storage.set_attribute(number, REOPENED, None)

    def _progress_at(self, number: int, steps: Mapping[int, int]) -> dict[str, Any]:
        """Return the progress of a trial by its reports."""
        known = self._reports(self._storage.trial(number))
        if not known:
            return {}
        last = max(known)
        progress: dict[str, Any] = {"epoch": last, "step": steps.get(last, 0)}
        value = value_of(known, minimize=self.minimize, select=self.select)
        best = last if self.select == "final" else None
        if value is not None and best is None:
            best = min(epoch for epoch in known if tuple(known[epoch]) == value)
        if best is not None and best in steps:
            progress |= {"best_epoch": best, "best_step": steps[best]}
            progress |= self._limited(*known[best])
        return progress


def _optuna_values(record: TrialRecord, ending: Ending, *, several: bool) -> Sequence[float]:
    """Return the values of an ended trial: as Optuna does, the last report of a pruned one."""
    if ending == "complete":
        assert record.values, "a trial without a value does not complete"
        return record.values
    if ending == "failed" or several or not record.reports:
        return ()
    last = record.reports[max(record.reports)]
    return () if math.isnan(last) else (last,)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
