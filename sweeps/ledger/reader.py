"""Read a ledger from any process by plain SQL, without Optuna.

Optuna and SQLAlchemy take half a second to import, and another half to build their objects for a
thousand trials. What must not live here: code that writes, and Optuna (`ledger`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps.ledger.attributes import (
    PLAN,
    REPORT,
    RUN_FROM,
    SECONDS,
    SELECT,
    SERIES,
    WARM_START,
    abort_in,
    attempts_in,
    limits_in,
    repeats_in,
    reports_in,
    trial_fields,
)
from sweeps.ledger.over_seeds import with_seeds
from sweeps.ledger.ranking import front, value_of
from sweeps.ledger.reasons import clipped
from sweeps.ledger.sqlite import STUDY, LedgerFile, param_rows, report_rows, trial_rows
from sweeps.ledger.trials import STATES, TrialRecord, TrialSummary
from sweeps.optuna_compat import tables
from sweeps.spec.sections import Select

_TOLD_VALUE = tables.number_sql(*tables.VALUE)
_IS_REPORT = f"key GLOB '{REPORT}*'"


class LedgerReader:
    """A snapshot of a ledger. The time to read it does not depend on the length of the curves."""

    def __init__(self, path: Path) -> None:
        self._location = LedgerFile(path)
        with self._location.reading() as db:
            self._location.check_tables(db)
            directions = db.execute(tables.DIRECTIONS_QUERY, {"name": STUDY}).fetchall()
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
            self.limits = limits_in(notes, len(self.minimizes))
            """The limits on reported metrics by which its trials are feasible or not."""
            self.num_published = int(notes.get("concluded", 0))
            """How many trials the sweep had when its best trial was last published; 0 before."""
            self.abort = abort_in(notes)
            """Why the last driver stopped the sweep by itself; None if it did not."""
            self.series: dict[str, Any] | None = notes.get(SERIES)
            """The last request for extra trials that are added in turns; None: none was made."""
            self.seconds = float(notes.get(SECONDS, 0.0))
            """For how many seconds all drivers together have run the sweep's trials."""
            self.run_from: dict[str, Any] = notes.get(RUN_FROM, {})
            """Where the sweep and its code lay for the last driver; see `attributes.RUN_FROM`."""
            self.plan: dict[str, Any] | None = notes.get(PLAN)
            """What the sweep was expected to take; None before its first trial."""
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
        """Return all trials with their curves."""
        curves = self.all_reports()
        return [
            TrialRecord(
                **vars(trial),
                reports={epoch: one[0] for epoch, one in curves[trial.number].items()},
                all_reports={e: one for e, one in curves[trial.number].items() if len(one) > 1},
            )
            for trial in self.trials
        ]

    def warm_start(self) -> dict[str, Any] | None:
        """Return the stored trials of earlier sweeps, in the form of `WarmStart.to_data`."""
        with self._location.reading() as db:
            asked = {**self._study, "key": WARM_START}
            found = db.execute(tables.STUDY_SYSTEM_ATTRIBUTE_QUERY, asked).fetchone()
        return None if found is None else json.loads(found[0])

    def reports(self) -> dict[int, dict[int, float]]:
        """Return the (first) metric after each reported epoch, by trial."""
        return {
            number: {epoch: values[0] for epoch, values in curve.items()}
            for number, curve in self.all_reports().items()
        }

    def all_reports(self) -> dict[int, dict[int, tuple[float, ...]]]:
        """Return the values of all metrics after each reported epoch, by trial."""
        found: dict[int, dict[int, tuple[float, ...]]] = {}
        notes: dict[int, dict[str, Any]] = {}
        with self._location.reading() as db:
            for number, epoch, value in report_rows(db, self._study):
                found.setdefault(number, {})[epoch] = (value,)
            query = tables.REPORT_ATTRIBUTES_QUERY.format(is_report=_IS_REPORT)
            for number, key, text in db.execute(query, self._study):
                notes.setdefault(number, {})[key] = json.loads(text)
            for number, mine in notes.items():
                found[number] = {epoch: tuple(one) for epoch, one in reports_in(mine).items()}
        return {trial.number: found.get(trial.number, {}) for trial in self.trials}

    def reports_of(self, number: int) -> dict[int, float] | dict[int, list[float]]:
        """Return one trial's reports: a number each, or a list for several metrics."""
        found = self.all_reports()[number].items()
        if len(self.minimizes) > 1:
            return {epoch: list(values[: len(self.minimizes)]) for epoch, values in found}
        return {epoch: values[0] for epoch, values in found}

    def _read_trials(self, db: sqlite3.Connection) -> Iterator[TrialSummary]:
        params: dict[int, dict[str, Any]] = {}
        read = tables.ParamDecoder()
        for trial, name, value, distribution in param_rows(db, self._study):
            params.setdefault(trial, {})[name] = read(value, distribution)
        attributes: dict[int, dict[str, Any]] = {}
        query = tables.ATTRIBUTES_QUERY.format(is_report=_IS_REPORT)
        for trial, key, text in db.execute(query, self._study):
            attributes.setdefault(trial, {}).update(clipped({key: json.loads(text)}))
        values = self._values(db)
        for trial, number, state, *_ in trial_rows(db, self._study):
            yield TrialSummary(
                number=number,
                state=STATES[state],
                value=values.get(trial, (None,))[0],
                others=values.get(trial, (None,))[1:],
                limits=self.limits,
                select=self.select,
                **trial_fields(params.get(trial, {}), attributes.get(trial, {})),
            )

    def _values(self, db: sqlite3.Connection) -> dict[int, tuple[Any, ...]]:
        """Return the values of each trial, as `value_of` does, by Optuna's trial id.

        Optuna stores them as the values of a complete trial, so its curve is not read.
        """
        if len(self.minimizes) == 1:
            pick = "MIN" if self.minimize else "MAX"
            final = self.select == "final"
            query = tables.LAST_VALUES_QUERY if final else tables.BEST_VALUES_QUERY
            query = query.format(number=_TOLD_VALUE, pick=pick)
            single = db.execute(query, self._study)
            return {trial: (_number(value),) for trial, value in single}
        found: dict[int, tuple[Any, ...]] = {}
        query = tables.VALUES_QUERY.format(number=_TOLD_VALUE)
        for trial, value in db.execute(query, self._study):
            found[trial] = (*found.get(trial, ()), _number(value))
        notes: dict[int, dict[str, Any]] = {}
        query = tables.UNFINISHED_REPORTS_QUERY.format(is_report=_IS_REPORT)
        for trial, key, text in db.execute(query, self._study):
            notes.setdefault(trial, {})[key] = json.loads(text)
        for trial, mine in notes.items():
            several = reports_in(mine)
            value = value_of(several, minimize=self.minimize, select=self.select) or (None,)
            found[trial] = value[: len(self.minimizes)]
        return found


def _number(value: Any) -> float | None:
    """Return a column's value as a number; SQLite stores any type in any column."""
    return None if value is None else float(value)
