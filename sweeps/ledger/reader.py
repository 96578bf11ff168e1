"""Looking into a ledger from any process, by plain SQL: what a trial is, and reading them all.

Optuna and SQLAlchemy take half a second to import and as long again to build their objects for a
thousand trials; looking needs neither. What must not live here: anything that writes, and Optuna
(see `ledger`).
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
from sweeps.ledger.dialect import Rows, check_tables, one, typed
from sweeps.ledger.location import LedgerLocation, as_location
from sweeps.ledger.texts import clipped
from sweeps.optuna_compat import tables

ATTEMPT = "attempt "
"""A study's notes, by number from 1: from where and with what each driver ran it."""
SECONDS = "seconds"
"""A study's note: how long its trials have been run."""
SIGNALS = "signals"
"""A trial's note: what deserved a look when it reported last."""
GENERATION = "generation"
"""A study's note: the epoch at which a population last decided who goes on from whom."""
WARM_START = "gradsweep:warm_start"
"""A study's system attribute, which is read only where it is asked for."""
LINEAGE = "lineage"
"""A trial's note: from whom it went on, after which epoch, and with what parameters."""
ACCUMULATION = "accumulation"
"""A trial's note: its micro-batches per step, once they are not those of its configuration."""
ENDED = "ended"
"""A trial's note: how many of the sweep's trials had ended with it. Clocks may be set back."""
REPORT = "report "
"""A trial's notes where the sweep has several metrics, by epoch: all their values. Optuna reports
single values, and TPE breaks on a trial that was pruned after one if the study has several
directions."""
Ending = Literal["complete", "pruned", "failed"]
ENDINGS: tuple[Ending, ...] = ("complete", "pruned", "failed")

_STATES = {
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


class PbtPerturbation(NamedTuple):
    """A member of a population goes on from another one, with other parameters."""

    epoch: int
    """Epochs completed by then."""
    donor: int
    """Whose weights it takes, by number."""
    params: dict[str, Any]
    """With what it goes on."""


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """One trial as the ledger knows it, without its curve."""

    number: int
    state: str
    """`waiting`, `running`, `complete`, `pruned` or `failed`."""
    params: dict[str, Any]
    """With what it trains, or trained last."""
    value: float | None
    """The best reported value of the (first) metric, None before the first report."""
    others: tuple[float, ...] = ()
    """What the sweep's other metrics were in that report: all of these values belong to one
    checkpoint, the best one."""
    ended_at: datetime | None = None
    """When its end was told."""
    finish_order: int = 0
    """Which end among the sweep's that was, from 1; 0 where an earlier version told it."""
    attempts: int = 0
    reason: str | None = None
    traceback: str | None = None
    step: int = 0
    epoch: int = 0
    best_step: int | None = None
    """Where `value` was reported."""
    best_epoch: int | None = None
    signals: tuple[str, ...] | None = None
    """What deserved a look when it reported last, in sentences; None where nothing ever did."""
    accumulation: int | None = None
    """Micro-batches per step, when the memory did not suffice for those it was configured with."""
    suggested: dict[str, Any] = field(default_factory=dict)
    """With what it began."""
    lineage: tuple[PbtPerturbation, ...] = ()
    """How its parameters changed while it trained, the earliest first."""

    @property
    def finished(self) -> bool:
        return self.state in ENDINGS

    @property
    def ended_ms(self) -> int | None:
        """When its end was told, in milliseconds since the Unix epoch."""
        return None if self.ended_at is None else round(self.ended_at.timestamp() * 1000)

    def params_at(self, epoch: int) -> dict[str, Any]:
        """Return with what it trained that epoch, counted from 1."""
        before = [one.params for one in self.lineage if one.epoch < epoch]
        return before[-1] if before else self.suggested

    @property
    def best_params(self) -> dict[str, Any]:
        """With what it came to its best report."""
        return self.params if self.best_epoch is None else self.params_at(self.best_epoch)

    @property
    def values(self) -> tuple[float, ...]:
        """The value of each metric; none before the first report."""
        return () if self.value is None else (self.value, *self.others)

    @property
    def result(self) -> float | list[float] | None:
        """The value as it is told: a number, or a list where the sweep has several metrics."""
        return [*self.values] if self.others else self.value


@dataclass(frozen=True, kw_only=True)
class TrialRecord(TrialSummary):
    """One trial with its curve."""

    reports: dict[int, float]
    """The (first) metric after each reported epoch."""


Trial = TypeVar("Trial", bound=TrialSummary)


def best_report(values: Iterable[float], *, minimize: bool) -> float | None:
    """Return the best of some reports: NaN and infinity never are, and of none there is none."""
    return (min if minimize else max)(filter(math.isfinite, values), default=None)


def best_reports(
    reports: Mapping[int, Sequence[float]], *, minimize: bool
) -> tuple[float, ...] | None:
    """Return the values of the report that is best by its first; of equals the earlier.

    A report of which a value is not finite is never the best.
    """
    finite = [tuple(reports[epoch]) for epoch in sorted(reports) if is_finite(reports[epoch])]
    return (min if minimize else max)(finite, key=operator.itemgetter(0), default=None)


def is_finite(values: Sequence[float]) -> bool:
    """Whether each value is a number that has an order."""
    return all(map(math.isfinite, values))


def front(trials: Iterable[Trial], minimizes: Sequence[bool]) -> list[Trial]:
    """Return the best trials, by the first metric the best first.

    With one metric that is the complete trial with the best value, of equals the first. With
    several it is the Pareto front: the complete trials that no other one beats in one metric while
    it is as good in all. Optuna's `best_trials` is the same, but Optuna is not loaded to look.

    Args:
        minimizes: Of each metric, whether less is better.
    """
    ranked = ranking(trials, minimize=minimizes[0])
    if len(minimizes) == 1:
        return ranked[:1]
    return [ranked[index] for index in undominated([t.values for t in ranked], minimizes)]


def undominated(values: Sequence[Sequence[float]], minimizes: Sequence[bool]) -> list[int]:
    """Return the indices of those that none of the others dominates, by the first value the best
    first.
    """
    losses = [
        tuple(v if low else -v for v, low in zip(one, minimizes, strict=True)) for one in values
    ]
    kept: list[int] = []
    # In this order nothing dominates what comes before it.
    for index in sorted(range(len(losses)), key=losses.__getitem__):
        mine = losses[index]
        if not any(
            losses[other] != mine and all(map(operator.le, losses[other], mine)) for other in kept
        ):
            kept.append(index)
    return kept


def ranking(trials: Iterable[Trial], *, minimize: bool) -> list[Trial]:
    """Return the complete trials, by the first metric the best first."""
    complete = [t for t in trials if t.state == "complete" and t.value is not None]
    return sorted(complete, key=lambda t: t.value or 0.0, reverse=not minimize)


def noted(suggested: dict[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a trial that a ledger keeps as parameters and user attributes."""
    attributes = clipped(attributes)
    progress = attributes.get("progress", {})
    lineage = tuple(PbtPerturbation(*one) for one in attributes.get(LINEAGE, ()))
    return {
        "suggested": suggested,
        "lineage": lineage,
        "params": lineage[-1].params if lineage else suggested,
        "attempts": int(attributes.get("attempts", 0)),
        # A user's code said so, to an earlier release perhaps, which kept it as it came.
        "reason": printable(reason) if (reason := attributes.get("reason")) else None,
        "traceback": visible(said) if (said := attributes.get("traceback")) else None,
        "step": int(progress.get("step", 0)),
        "epoch": int(progress.get("epoch", 0)),
        "best_step": progress.get("best_step"),
        "best_epoch": progress.get("best_epoch"),
        "signals": tuple(attributes[SIGNALS]) if SIGNALS in attributes else None,
        "accumulation": attributes.get(ACCUMULATION),
        "finish_order": attributes.get(ENDED, 0),
    }


def reports_in(attributes: Mapping[str, Any]) -> dict[int, list[float]]:
    """Return the values after each epoch that a trial of several metrics has among its notes."""
    found = {k.removeprefix(REPORT): v for k, v in attributes.items() if k.startswith(REPORT)}
    return {epoch: found[str(epoch)] for epoch in sorted(map(int, found))}


def attempts_in(attributes: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what a study's attributes say of each driver, in turn."""
    names = (f"{ATTEMPT}{number}" for number in itertools.count(1))
    return [attributes[name] for name in itertools.takewhile(attributes.__contains__, names)]


class LedgerReader:
    """A ledger as it is at one moment, in a time that does not grow with the trials' curves.

    Args:
        location: Where the ledger is; a path stands for the file there.

    Raises:
        LedgerError: There is none, it is not readable as one, or a release of Optuna with other
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
            """Of each metric, whether less is better."""
            self.minimize: bool = self.minimizes[0]
            self.sweep_id = str(notes["sweep_id"])
            """The sweep's identity, by which tracking finds its runs again."""
            self.attempts = attempts_in(notes)
            """From where and with what each driver of the sweep ran it, as tags."""
            self.concluded = int(notes.get("concluded", 0))
            """How many trials the sweep had when its best was last published; 0 before."""
            self.seconds = float(notes.get(SECONDS, 0.0))
            """How long its trials have been run, by all drivers together."""
            self.trials = list(self._read_trials(db))
            """All trials, in the order of their numbers."""

    def front(self) -> list[TrialSummary]:
        """The best trial, or with several metrics the Pareto front; see `front`."""
        return front(self.trials, self.minimizes)

    def best(self) -> TrialSummary | None:
        """The trial that is the best; None when none is complete, or several are."""
        best = self.front()
        return best[0] if len(best) == 1 else None

    def records(self) -> list[TrialRecord]:
        """All trials with their curves.

        Raises:
            LedgerError: It can no longer be read.
        """
        curves = self.reports()
        return [TrialRecord(**vars(t), reports=curves[t.number]) for t in self.trials]

    def warm_start(self) -> dict[str, Any] | None:
        """What the sweep was given of earlier ones, as `WarmStart` writes it.

        Raises:
            LedgerError: It can no longer be read.
        """
        with self._location.reading() as db:
            text = one(
                db.execute(tables.STUDY_SYSTEM_ATTRIBUTE_QUERY, {**self._study, "key": WARM_START})
            )
        return None if text is None else json.loads(text)

    def reports(self) -> dict[int, dict[int, float]]:
        """The (first) metric after each reported epoch, by trial.

        Raises:
            LedgerError: It can no longer be read.
        """
        found: dict[int, dict[int, float]] = {trial.number: {} for trial in self.trials}
        with self._location.reading() as db:
            for number, epoch, values in self._reported(db):
                if number in found:  # not one that was added after this view was taken
                    found[number][epoch] = values[0]
        return found

    def reports_of(self, number: int) -> dict[int, float] | dict[int, Sequence[float]]:
        """One trial's reports: a number each, or a list where the sweep has several metrics.

        Raises:
            LedgerError: It can no longer be read.
        """
        with self._location.reading() as db:
            found = {epoch: values for _, epoch, values in self._reported(db, number)}
        return found if len(self.minimizes) > 1 else {e: v[0] for e, v in found.items()}

    def _reported(
        self, db: Rows, number: int | None = None
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

    def _read_trials(self, db: Rows) -> Iterator[TrialSummary]:
        params: dict[int, dict[str, Any]] = {}
        read = tables.ParamDecoder()
        suggested = db.execute(tables.PARAMS_QUERY, self._study)
        for trial, name, value, distribution in typed(suggested, int, str, (int, float), str):
            params.setdefault(trial, {})[name] = read(value, distribution)
        attributes: dict[int, dict[str, Any]] = {}
        query = tables.ATTRIBUTES_QUERY.format(is_report=self._is_report)
        for trial, key, text in db.execute(query, self._study):
            attributes.setdefault(trial, {}).update(clipped({key: json.loads(text)}))
        values = self._best_values(db)
        rows = db.execute(tables.TRIALS_QUERY, self._study)
        for index, (trial, number, state, ended) in enumerate(typed(rows, int, int, str, object)):
            if number != index:
                raise ValueError(f"its trial {index} has the number {number}")
            yield TrialSummary(
                number=number,
                state=_STATES[state],
                value=values.get(trial, (None,))[0],
                others=values.get(trial, (None,))[1:],
                ended_at=datetime.fromisoformat(str(ended)) if ended else None,
                **noted(params.get(trial, {}), attributes.get(trial, {})),
            )

    def _best_values(self, db: Rows) -> dict[int, tuple[Any, ...]]:
        """The values of each trial's best report, by the study's own number.

        A complete trial was told them as its values: its curve need not be read.
        """
        if len(self.minimizes) == 1:
            pick = "MIN" if self.minimize else "MAX"
            query = tables.BEST_VALUES_QUERY.format(number=self._told_value, pick=pick)
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
            found[trial] = best_reports(reports_in(mine), minimize=self.minimize) or (None,)
        return found


def _number(value: Any) -> float | None:
    """Return a column's number; SQLite keeps whatever is put there.

    Raises:
        ValueError: It is none.
    """
    return None if value is None else float(value)
