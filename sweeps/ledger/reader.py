"""Read a ledger from any process by plain SQL, without Optuna; define what a trial is.

Optuna and SQLAlchemy take half a second to import, and another half to build their objects for a
thousand trials. What must not live here: code that writes, and Optuna (`ledger`).
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar

from redaction.escapes import printable, visible
from sweeps.config.sections import Select
from sweeps.config.trial_run import TrialSeed
from sweeps.early_stopping.metric_values import Value
from sweeps.ledger.confirm_request import CONFIRM, ConfirmRequest
from sweeps.ledger.dialect import ReadConnection, check_tables, one, typed
from sweeps.ledger.failed_attempts import (
    FailedAttempt,
    Reopened,
    failed_attempts_in,
    reopened_in,
)
from sweeps.ledger.location import LedgerLocation, as_location
from sweeps.ledger.over_seeds import OverSeeds, Repeats, num_missing, with_seeds
from sweeps.ledger.texts import clipped
from sweeps.optuna_compat import tables

ATTEMPT = "attempt "
"""Study attributes, numbered from 1: the host, command and versions of each driver."""
SECONDS = "seconds"
"""A study attribute: for how many seconds the trials have run."""
PLAN = "plan"
"""A study attribute: what a driver expected the sweep to take, when it began to train."""
ABORT = "stopped_itself"
"""A study attribute: the failure for which the last driver stopped the sweep; null: for none."""
SIGNALS = "signals"
"""A trial attribute: the health signals of its last report."""
GENERATION = "generation"
"""A study attribute: the epoch of the last exploit decision of a population."""
WARM_START = "gradsweep:warm_start"
"""A study's system attribute: the trials of earlier sweeps. Read only on request."""
DEVICES = "devices"
"""An entry of a trial's progress: CPU-seconds, GPU-seconds, and its seconds that these count."""
LINEAGE = "lineage"
"""A trial attribute: each change of a population's trial, with donor, epoch and parameters."""
ACCUMULATION = "accumulation"
"""A trial attribute: micro-batches per step, if it differs from the configuration."""
FINISHES = "finishes"
"""A trial attribute: the number of the pruned trial that this trial trains to its end."""
SEED_NUMBER = "seed_number"
"""A trial attribute: the number that decides its seed, if it is not the trial's own."""
EXEMPT = "exempt"
"""A trial attribute: that the trial is exempt from early stopping."""
WOULD_STOP = "would_stop"
"""A trial attribute of an exempt trial: at which report it would have been stopped, and why."""
ROLE = "role"
"""A trial attribute: role, origin and common seed, where they are not those of `TrialSummary`."""
REPEATS = "repeats"
"""A study attribute: the spec's `repeats`, if each configuration trains with several seeds."""
SELECT = "select"
"""A study attribute: the spec's `select`, if it is not `checkpoint`."""
ENDED = "ended"
"""A trial attribute: how many of the sweep's trials had ended, this one included. Times do not
order the ends reliably, because a clock may be set back."""
REPORT = "report "
"""Trial attributes of a sweep with several metrics, by epoch: all values. Optuna stores one value
per report, and TPE fails on such a trial if it is pruned and the study has several directions."""
Role = Literal["search", "finish", "confirm", "repeat"]
"""Why a trial exists: the search suggested it, or it trains the point of another one, its origin:
to the end that early stopping took from it, again to confirm its value, or with another seed."""
Ending = Literal["complete", "pruned", "failed"]
ENDINGS: tuple[Ending, ...] = ("complete", "pruned", "failed")

_STATES = {
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


class Abort(NamedTuple):
    """The failure for which a driver stopped a sweep before all of its trials had ended."""

    key: str
    """The key of the spec that says so: `failures`, or a key below it."""
    why: str
    """Which trials failed and how, in one line."""
    trial: int
    """The number of the last of these trials."""
    kind: str
    """The kind of the failure."""


class PbtPerturbation(NamedTuple):
    """A change by PBT: a trial resumes from another trial's checkpoint with other parameters."""

    epoch: int
    """Epochs completed by then."""
    donor: int
    """The number of the other trial."""
    params: dict[str, Any]
    """The new parameters."""


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """One trial in the ledger, without its curve."""

    number: int
    state: str
    """`waiting`, `running`, `complete`, `pruned` or `failed`."""
    params: dict[str, Any]
    """Its current parameters; for a population, those of the last change."""
    value: float | None
    """Its value of the (first) metric, as `value_of` defines it; None before the first report."""
    others: tuple[float, ...] = ()
    """The sweep's other metrics in the report of `value`: all belong to one checkpoint."""
    select: Select = "checkpoint"
    """What the values of the sweep's trials are."""
    started_at: datetime | None = None
    """When a worker first started it, in local time; None: never, or by an earlier release."""
    ended_at: datetime | None = None
    """When its end was recorded, in local time."""
    seconds: float | None = None
    """For how long workers trained it, all attempts together; None: an earlier release did."""
    cpu_seconds: float | None = None
    """Its seconds times the CPUs that it had, attempt by attempt; None: unknown for some of them,
    which an earlier release trained."""
    gpu_seconds: float | None = None
    """The same for its GPUs or its share of one; 0 on CPUs."""
    finish_order: int = 0
    """Its position in the order of ends, from 1; 0 if an earlier release recorded the end."""
    attempts: int = 0
    reason: str | None = None
    traceback: str | None = None
    step: int = 0
    epoch: int = 0
    best_step: int | None = None
    """The step of `value`'s report: the best one, or the last one with `select: final`."""
    best_epoch: int | None = None
    signals: tuple[str, ...] | None = None
    """The health signals of its last report, in sentences; None if it never had any."""
    accumulation: int | None = None
    """Micro-batches per step, if the configured number needed too much memory."""
    suggested: dict[str, Any] = field(default_factory=dict)
    """Its first parameters."""
    lineage: tuple[PbtPerturbation, ...] = ()
    """The changes of its parameters during training, the earliest first."""
    role: Role = "search"
    origin: int | None = None
    """The number of the trial whose point it trains; None for a trial of the search."""
    seed_index: int | None = None
    """The position of its common seed, from 0; None: its seed is its own."""
    split: bool = False
    """Whether its common seed also decides how the task splits the data."""
    seed_number: int | None = None
    """The number that decides its seed: the one that it would have if no trial before it
    confirmed another one. None: its own."""
    exempt: bool = False
    """Whether it is exempt from early stopping; see `early_stopping.exempt`."""
    would_stop_at: int | None = None
    """The report at which it would have been stopped if it were not exempt; None: at none."""
    would_stop_reason: str | None = None
    """Why it would have been stopped there."""
    failed_attempts: tuple[FailedAttempt, ...] = ()
    """The failures after which it was run again, the earliest first."""
    reopened: Reopened | None = None
    """What is still to be done before it may train again; None: nothing."""
    over_seeds: OverSeeds | None = None
    """Its configuration, if the sweep has `repeats` and this is the first seed. `value` and
    `others` are then those of the configuration."""

    @property
    def finishes(self) -> int | None:
        """The number of the pruned trial that it trains to its end; None: it finishes none."""
        return self.origin if self.role == "finish" else None

    @property
    def confirms(self) -> int | None:
        """The number of the leader that it trains again; None: it confirms none."""
        return self.origin if self.role == "confirm" else None

    @property
    def search_number(self) -> int:
        """The number of the search's trial that has its point: its own, or its origin's."""
        return self.number if self.origin is None else self.origin

    @property
    def seed(self) -> TrialSeed:
        """What its seed is derived from; a trial that finishes another one has that one's."""
        if self.seed_index is None:
            number = self.search_number if self.seed_number is None else self.seed_number
            return TrialSeed("trial", number)
        purpose: Literal["confirm", "repeat"] = "confirm" if self.role == "confirm" else "repeat"
        return TrialSeed(purpose, self.seed_index, self.split)

    @property
    def finished(self) -> bool:
        return self.state in ENDINGS

    @property
    def settled(self) -> bool:
        """Whether it has ended, and all seeds of its configuration have."""
        return self.finished and (self.over_seeds is None or self.over_seeds.state != "running")

    @property
    def has_result(self) -> bool:
        """Whether it counts among the best.

        A trial that confirms another one does not. With `repeats`, a configuration counts once all
        of its seeds have trained to their end, and its first seed stands for it.
        """
        if self.over_seeds is not None:
            return self.over_seeds.state == "complete"
        return self.role in ("search", "finish") and has_result(self.state, self.select)

    @property
    def ended_ms(self) -> int | None:
        """When its end was recorded, in milliseconds since the Unix epoch."""
        return None if self.ended_at is None else round(self.ended_at.timestamp() * 1000)

    def params_at(self, epoch: int) -> dict[str, Any]:
        """Return the parameters with which it trained an epoch, counted from 1."""
        before = [one.params for one in self.lineage if one.epoch < epoch]
        return before[-1] if before else self.suggested

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of `value`'s report."""
        return self.params if self.best_epoch is None else self.params_at(self.best_epoch)

    @property
    def values(self) -> tuple[float, ...]:
        """The value of each metric; none before the first report."""
        return () if self.value is None else (self.value, *self.others)

    @property
    def own_value(self) -> float | None:
        """The value of this training alone, whatever other seeds its configuration has."""
        if self.over_seeds is None:
            return self.value
        return self.over_seeds.own[0] if self.over_seeds.own else None

    @property
    def result(self) -> float | list[float] | None:
        """The value as messages show it: a number, or a list for several metrics."""
        return [*self.values] if self.others else self.value


@dataclass(frozen=True, kw_only=True)
class TrialRecord(TrialSummary):
    """One trial with its curve."""

    reports: dict[int, float]
    """The (first) metric after each reported epoch."""
    all_reports: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """With several metrics, all of them after each reported epoch; else empty."""

    @property
    def compared_reports(self) -> dict[int, Value]:
        """The reports by which early stopping compares it with other trials.

        An exempt trial counts as if it had ended where it would have been stopped.
        """
        found: Mapping[int, Value] = self.all_reports or self.reports
        end = self.would_stop_at
        return {epoch: one for epoch, one in found.items() if end is None or epoch <= end}


Trial = TypeVar("Trial", bound=TrialSummary)


def of_search(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials of the search, without those that train the point of another trial.

    `trials` of the spec counts these, and samplers, stopping rules and stop criteria receive only
    these. So a sweep decides the same whether or not a pruned trial was trained to its end.
    """
    return [trial for trial in trials if trial.role == "search"]


def is_of_search(attributes: Mapping[str, Any]) -> bool:
    """Return whether the search suggested a trial, by the trial's user attributes."""
    if FINISHES in attributes:
        return False
    return ROLE not in attributes or bool(attributes[ROLE]["role"] == "search")


def repeated_by(attributes: Mapping[str, Any]) -> int | None:
    """Return the configuration that a trial trains with a further seed, by its user attributes.

    None for a trial with another role.
    """
    role = attributes.get(ROLE, {})
    return int(role["origin"]) if role.get("role") == "repeat" else None


def role_attributes(
    role: Role, origin: int | None, seed_index: int | None, *, split: bool = False
) -> dict[str, Any]:
    """Return the user attributes by which `trial_fields` knows why a trial exists."""
    if role == "finish" and seed_index is None:
        return {FINISHES: origin}  # as earlier releases wrote and read it
    splits = {"split": True} if split else {}
    return {ROLE: {"role": role, "origin": origin, "seed_index": seed_index, **splits}}


def _role_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    if FINISHES in attributes:
        return {"role": "finish", "origin": int(attributes[FINISHES])}
    return dict(attributes.get(ROLE, {"role": "search"}))


def _exemption_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    epoch, reason = attributes.get(WOULD_STOP, (None, None))
    return {
        "exempt": bool(attributes.get(EXEMPT, False)),
        "would_stop_at": None if epoch is None else int(epoch),
        "would_stop_reason": None if reason is None else printable(str(reason)),
    }


def count_trials(spec_trials: int, trials: Sequence[TrialSummary], seeds: int = 1) -> int:
    """Return how many trials a sweep has when it is complete, with the extra ones.

    With several seeds it is the most that the sweep can have: a configuration that is stopped gets
    no further seeds, and the number then becomes smaller.

    Args:
        spec_trials: `num_trials` of the spec: how many configurations the search suggests.
        trials: All trials that exist.
        seeds: With how many seeds each configuration trains.
    """
    num_new = max(0, spec_trials - len(of_search(trials)))
    return len(trials) + num_missing(trials, seeds) + seeds * num_new


def best_report(values: Iterable[float], *, minimize: bool) -> float | None:
    """Return the best finite value; None without one."""
    return (min if minimize else max)(filter(math.isfinite, values), default=None)


def best_reports(
    reports: Mapping[int, Sequence[float]], *, minimize: bool
) -> tuple[float, ...] | None:
    """Return the values of the report with the best first value; of equal reports, the earliest.

    A report with a value that is not finite is never the best.
    """
    finite = [tuple(reports[epoch]) for epoch in sorted(reports) if is_finite(reports[epoch])]
    return (min if minimize else max)(finite, key=operator.itemgetter(0), default=None)


def value_of(
    reports: Mapping[int, Sequence[float]], *, minimize: bool, select: Select
) -> tuple[float, ...] | None:
    """Return what the values of a trial are, by its reports; None if it has none.

    This is the one definition for every view, for the checkpoint that is exported, and for what
    Optuna receives when a trial is complete.

    Args:
        reports: The value of each metric after each reported epoch.
        minimize: Whether less of the first metric is better.
        select: `checkpoint`: the report with the best first value. `final`: the last report, if
            it is finite.
    """
    if select == "checkpoint":
        return best_reports(reports, minimize=minimize)
    last = tuple(reports[max(reports)]) if reports else ()
    return last if last and is_finite(last) else None


def is_finite(values: Sequence[float]) -> bool:
    """Whether all values are finite."""
    return all(map(math.isfinite, values))


def front(trials: Iterable[Trial], minimizes: Sequence[bool]) -> list[Trial]:
    """Return the best trial or the Pareto front, sorted by the first metric.

    Every view, every export and the tags in MLflow use this definition. With one metric, the best
    trial is the first in `ranking`. With several metrics, the Pareto front holds the trials of
    `ranking` that no other dominates.

    Args:
        minimizes: For each metric, whether less is better.
    """
    ranked = ranking(trials, minimize=minimizes[0])
    if len(minimizes) == 1:
        return ranked[:1]
    return [ranked[index] for index in undominated([t.values for t in ranked], minimizes)]


def undominated(values: Sequence[Sequence[float]], minimizes: Sequence[bool]) -> list[int]:
    """Return the indices of values that no others dominate, sorted by the first value."""
    losses = [
        tuple(v if low else -v for v, low in zip(one, minimizes, strict=True)) for one in values
    ]
    kept: list[int] = []
    # In this order, no value dominates an earlier one.
    for index in sorted(range(len(losses)), key=losses.__getitem__):
        mine = losses[index]
        if not any(
            losses[other] != mine and all(map(operator.le, losses[other], mine)) for other in kept
        ):
            kept.append(index)
    return kept


def has_result(state: str, select: Select) -> bool:
    """Return whether a trial in this state counts among the best.

    Each new best value is saved in a checkpoint, so a pruned trial has one like a complete trial.
    The last value of a pruned trial is not that of a whole training, so `final` leaves it out. A
    running trial may still change, and the result of a failed one may be wrong.
    """
    return state == "complete" or (state == "pruned" and select == "checkpoint")


def ranking(trials: Iterable[Trial], *, minimize: bool) -> list[Trial]:
    """Return the trials that have a result, sorted by the first metric, the best first.

    Of trials with equal values, complete trials come first.
    """
    found = [t for t in trials if t.has_result and t.value is not None]
    sign = 1 if minimize else -1
    return sorted(found, key=lambda t: (sign * (t.value or 0.0), t.state != "complete"))


def trial_fields(
    suggested: dict[str, Any], attributes: Mapping[str, Any], completed: datetime | None = None
) -> dict[str, Any]:
    """Return a trial's fields from its stored parameters and user attributes.

    Args:
        completed: When Optuna recorded its end, in the local time of the driver's host.
    """
    attributes = clipped(attributes)
    progress = attributes.get("progress", {})
    lineage = tuple(PbtPerturbation(*one) for one in attributes.get(LINEAGE, ()))
    return {
        "suggested": suggested,
        "lineage": lineage,
        "params": lineage[-1].params if lineage else suggested,
        "attempts": int(attributes.get("attempts", 0)),
        # The user's code wrote these texts, and earlier releases stored them unchanged.
        "reason": printable(reason) if (reason := attributes.get("reason")) else None,
        "traceback": visible(text) if (text := attributes.get("traceback")) else None,
        "step": int(progress.get("step", 0)),
        "epoch": int(progress.get("epoch", 0)),
        "started_at": _local(progress.get("started_ms")),
        "ended_at": _local(progress.get("ended_ms")) or completed,
        "seconds": None if (time := progress.get("seconds")) is None else float(time),
        **_device_seconds(progress),
        "best_step": progress.get("best_step"),
        "best_epoch": progress.get("best_epoch"),
        "signals": tuple(attributes[SIGNALS]) if SIGNALS in attributes else None,
        "accumulation": attributes.get(ACCUMULATION),
        "finish_order": attributes.get(ENDED, 0),
        "failed_attempts": failed_attempts_in(attributes),
        "reopened": reopened_in(attributes),
        **_role_in(attributes),
        "seed_number": attributes.get(SEED_NUMBER),
        **_exemption_in(attributes),
    }


def _device_seconds(progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device-seconds of a trial, if they were counted for all of its seconds."""
    cpu, gpu, counted = progress.get(DEVICES, (None, None, None))
    if counted is None or counted != progress.get("seconds"):
        return {}
    return {"cpu_seconds": float(cpu), "gpu_seconds": float(gpu)}


def _local(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else datetime.fromtimestamp(at_ms / 1000)


def reports_in(attributes: Mapping[str, Any]) -> dict[int, list[float]]:
    """Return the values by epoch from the attributes of a trial with several metrics."""
    found = {k.removeprefix(REPORT): v for k, v in attributes.items() if k.startswith(REPORT)}
    return {epoch: found[str(epoch)] for epoch in sorted(map(int, found))}


def compared_values(
    attributes: Mapping[str, Any], intermediate: Mapping[int, float]
) -> Mapping[int, Value]:
    """Return what each report of a trial brought, as stopping rules receive it.

    Args:
        attributes: The trial's user attributes, which have the reports of several metrics.
        intermediate: Optuna's values by epoch, which are the reports of a single metric.
    """
    if intermediate:
        return intermediate
    return {epoch: tuple(values) for epoch, values in reports_in(attributes).items()}


def attempts_in(attributes: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the tags of each driver from a study's attributes, in order."""
    names = (f"{ATTEMPT}{number}" for number in itertools.count(1))
    return [attributes[name] for name in itertools.takewhile(attributes.__contains__, names)]


def repeats_in(attributes: Mapping[str, Any]) -> Repeats | None:
    """Return how many seeds each configuration gets, from a study's attributes; None: one."""
    return Repeats(*attributes[REPEATS]) if REPEATS in attributes else None


def abort_in(attributes: Mapping[str, Any]) -> Abort | None:
    """Return the stored failure that stopped the sweep, from a study's attributes."""
    found = attributes.get(ABORT)
    if found is None:
        return None
    key, why, trial, kind = found
    return Abort(str(key), printable(str(why)), int(trial), str(kind))


class LedgerReader:
    """A snapshot of a ledger. The time to read it does not depend on the length of the curves.

    Args:
        location: The ledger's location; a path means the SQLite file there.

    Raises:
        LedgerError: There is no ledger, it cannot be read, or a release of Optuna with other
            tables wrote it.
    """

    def __init__(self, location: LedgerLocation | Path) -> None:
        self._location = as_location(location)
        sql = self._location.sql
        self._reported_value = sql.number(*tables.INTERMEDIATE_VALUE)
        self._told_value = sql.number(*tables.VALUE)
        self._is_report = sql.begins(REPORT)
        with self._location.reading() as db:
            check_tables(db, str(self._location))
            directions = db.execute(
                tables.DIRECTIONS_QUERY, {"name": self._location.study}
            ).fetchall()
            if not directions:
                raise self._location.damaged("it holds no study")
            self._study = {"study": directions[0][0]}
            attributes = dict(db.execute(tables.STUDY_ATTRIBUTES_QUERY, self._study))
            notes = {key: json.loads(text) for key, text in attributes.items()}
            self.minimizes = tuple(direction == "MINIMIZE" for _, direction in directions)
            """For each metric, whether less is better."""
            self.minimize: bool = self.minimizes[0]
            self.sweep_id = str(notes["sweep_id"])
            """The sweep's identity, by which tracking finds its runs again."""
            self.attempts = attempts_in(notes)
            """The host, command and versions of each driver of the sweep, as tags."""
            self.code: dict[str, str] = dict(notes.get("origin", {}).get("code", {}))
            """The sha256 of each source file of the task, as the newest driver found it."""
            self.select: Select = notes.get(SELECT, "checkpoint")
            """What the values of the sweep's trials are; see `value_of`."""
            self.repeats = repeats_in(notes)
            """How many seeds each configuration gets; None: one."""
            self.num_published = int(notes.get("concluded", 0))
            """How many trials the sweep had when its best trial was last published; 0 before."""
            self.abort = abort_in(notes)
            """Why the last driver stopped the sweep by itself; None if it did not."""
            self.confirm_request = ConfirmRequest.from_data(notes.get(CONFIRM))
            """What `sweep confirm` was last asked for; None: it never was."""
            self.seconds = float(notes.get(SECONDS, 0.0))
            """For how many seconds all drivers together have run the sweep's trials."""
            self.plan: dict[str, Any] | None = notes.get(PLAN)
            """What the sweep was expected to take; None if an earlier release began it."""
            self.trials = with_seeds(list(self._read_trials(db)), self.repeats)
            """All trials, in the order of their numbers."""

    def front(self) -> list[TrialSummary]:
        """Return the best trial, or with several metrics the Pareto front; see `front`."""
        return front(self.trials, self.minimizes)

    def best(self) -> TrialSummary | None:
        """Return the best trial; None if there is none, or if the Pareto front has several."""
        best = self.front()
        return best[0] if len(best) == 1 else None

    def records(self) -> list[TrialRecord]:
        """Return all trials with their curves.

        Raises:
            LedgerError: The ledger can no longer be read.
        """
        curves = self.all_reports()
        several = len(self.minimizes) > 1
        return [
            TrialRecord(
                **vars(trial),
                reports={epoch: one[0] for epoch, one in curves[trial.number].items()},
                all_reports=curves[trial.number] if several else {},
            )
            for trial in self.trials
        ]

    def warm_start(self) -> dict[str, Any] | None:
        """Return the stored trials of earlier sweeps, in the form of `WarmStart.to_data`.

        Raises:
            LedgerError: The ledger can no longer be read.
        """
        with self._location.reading() as db:
            text = one(
                db.execute(tables.STUDY_SYSTEM_ATTRIBUTE_QUERY, {**self._study, "key": WARM_START})
            )
        return None if text is None else json.loads(text)

    def reports(self) -> dict[int, dict[int, float]]:
        """Return the (first) metric after each reported epoch, by trial.

        Raises:
            LedgerError: The ledger can no longer be read.
        """
        return {
            number: {epoch: values[0] for epoch, values in curve.items()}
            for number, curve in self.all_reports().items()
        }

    def all_reports(self) -> dict[int, dict[int, tuple[float, ...]]]:
        """Return the values of all metrics after each reported epoch, by trial.

        Raises:
            LedgerError: The ledger can no longer be read.
        """
        found: dict[int, dict[int, tuple[float, ...]]] = {t.number: {} for t in self.trials}
        with self._location.reading() as db:
            for number, epoch, values in self._reported(db):
                if number in found:  # else the trial was added after this snapshot
                    found[number][epoch] = tuple(values)
        return found

    def reports_of(self, number: int) -> dict[int, float] | dict[int, Sequence[float]]:
        """Return one trial's reports: a number each, or a list for several metrics.

        Raises:
            LedgerError: The ledger can no longer be read.
        """
        with self._location.reading() as db:
            found = {epoch: values for _, epoch, values in self._reported(db, number)}
        return found if len(self.minimizes) > 1 else {e: v[0] for e, v in found.items()}

    def _reported(
        self, db: ReadConnection, number: int | None = None
    ) -> Iterator[tuple[int, int, Sequence[float]]]:
        """Yield number, epoch and values of each report, of one trial or of all."""
        asked = {**self._study, "number": number}
        if len(self.minimizes) == 1:
            reports = db.execute(tables.REPORTS_QUERY.format(number=self._reported_value), asked)
            for trial, epoch, value in typed(reports, int, int, (int, float, NoneType)):
                yield trial, epoch, (math.nan if value is None else float(value),)
            return
        notes: dict[int, dict[str, Any]] = {}
        query = tables.REPORT_ATTRIBUTES_QUERY.format(is_report=self._is_report)
        for trial, key, text in db.execute(query, asked):
            notes.setdefault(trial, {})[key] = json.loads(text)
        for trial, mine in notes.items():
            for epoch, values in reports_in(mine).items():
                yield trial, epoch, values

    def _read_trials(self, db: ReadConnection) -> Iterator[TrialSummary]:
        params: dict[int, dict[str, Any]] = {}
        read = tables.ParamDecoder()
        suggested = db.execute(tables.PARAMS_QUERY, self._study)
        for trial, name, value, distribution in typed(suggested, int, str, (int, float), str):
            params.setdefault(trial, {})[name] = read(value, distribution)
        attributes: dict[int, dict[str, Any]] = {}
        query = tables.ATTRIBUTES_QUERY.format(is_report=self._is_report)
        for trial, key, text in db.execute(query, self._study):
            attributes.setdefault(trial, {}).update(clipped({key: json.loads(text)}))
        values = self._values(db)
        rows = db.execute(tables.TRIALS_QUERY, self._study)
        for index, (trial, number, state, ended) in enumerate(typed(rows, int, int, str, object)):
            if number != index:
                raise ValueError(f"its trial {index} has the number {number}")
            yield TrialSummary(
                number=number,
                state=_STATES[state],
                value=values.get(trial, (None,))[0],
                others=values.get(trial, (None,))[1:],
                select=self.select,
                **trial_fields(
                    params.get(trial, {}),
                    attributes.get(trial, {}),
                    datetime.fromisoformat(str(ended)) if ended else None,
                ),
            )

    def _values(self, db: ReadConnection) -> dict[int, tuple[Any, ...]]:
        """Return the values of each trial, as `value_of` does, by Optuna's trial id.

        Optuna stores them as the values of a complete trial, so its curve is not read.
        """
        if len(self.minimizes) == 1:
            pick = "MIN" if self.minimize else "MAX"
            final = self.select == "final"
            query = tables.LAST_VALUES_QUERY if final else tables.BEST_VALUES_QUERY
            query = query.format(number=self._told_value, pick=pick)
            single = db.execute(query, self._study)
            return {trial: (_number(value),) for trial, value in single}
        found: dict[int, tuple[Any, ...]] = {}
        query = tables.VALUES_QUERY.format(number=self._told_value)
        for trial, value in db.execute(query, self._study):
            found[trial] = (*found.get(trial, ()), _number(value))
        notes: dict[int, dict[str, Any]] = {}
        query = tables.UNFINISHED_REPORTS_QUERY.format(is_report=self._is_report)
        for trial, key, text in db.execute(query, self._study):
            notes.setdefault(trial, {})[key] = json.loads(text)
        for trial, mine in notes.items():
            several = reports_in(mine)
            found[trial] = value_of(several, minimize=self.minimize, select=self.select) or (None,)
        return found


def _number(value: Any) -> float | None:
    """Return a column's value as a number; SQLite stores any type in any column.

    Raises:
        ValueError: The value is not a number.
    """
    return None if value is None else float(value)
