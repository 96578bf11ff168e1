"""Looking into a ledger from any process, by plain SQL: what a trial is, and reading them all.

Optuna and SQLAlchemy take half a second to import and as long again to build their objects for a
thousand trials; looking needs neither. What must not live here: anything that writes, and Optuna
(see `ledger`).
"""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from sweeps.layout import LedgerError
from sweeps.ledger_file import reading

ATTEMPT = "attempt "
"""A study's notes, by number from 1: from where and with what each driver ran it."""
SECONDS = "seconds"
"""A study's note: how long its trials have been run."""
SIGNALS = "signals"
"""A trial's note: what deserved a look when it reported last."""
ACCUMULATION = "accumulation"
"""A trial's note: its micro-batches per step, once they are not those of its configuration."""
Ending = Literal["complete", "pruned", "failed"]
ENDINGS: tuple[Ending, ...] = ("complete", "pruned", "failed")

_SCHEMA = (12, "v3.2.0.a")
"""The tables' version, as Optuna counts it itself and as its migrations do."""
_STATES = {
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


def _number(value: str, kind: str) -> str:
    """Return SQL for a stored number. Optuna keeps what is not finite beside it; 9e999 is infinity
    to SQLite, which has no NaN: that stays NULL, and no minimum takes it.
    """
    infinite = "WHEN 'INF_POS' THEN 9e999 WHEN 'INF_NEG' THEN -9e999"
    return f"CASE {kind} WHEN 'FINITE' THEN {value} {infinite} END"


_REPORTED = _number("intermediate_value", "intermediate_value_type")
_TOLD = _number("value", "value_type")


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """One trial as the ledger knows it, without its curve."""

    number: int
    state: str
    """`waiting`, `running`, `complete`, `pruned` or `failed`."""
    params: dict[str, Any]
    value: float | None
    """The best reported value of the metric, None before the first report."""
    ended_at: datetime | None = None
    """When its end was told."""
    attempts: int = 0
    reason: str | None = None
    traceback: str | None = None
    step: int = 0
    epoch: int = 0
    best_step: int | None = None
    """Where `value` was reported."""
    best_epoch: int | None = None
    signals: tuple[str, ...] = ()
    """What deserved a look when it reported last, in sentences."""
    accumulation: int | None = None
    """Micro-batches per step, when the memory did not suffice for those it was configured with."""

    @property
    def finished(self) -> bool:
        return self.state in ENDINGS


@dataclass(frozen=True, kw_only=True)
class TrialRecord(TrialSummary):
    """One trial with its curve."""

    reports: dict[int, float]
    """The metric after each reported epoch."""


Trial = TypeVar("Trial", bound=TrialSummary)


def best_report(values: Iterable[float], *, minimize: bool) -> float | None:
    """Return the best of some reports; a NaN is never the best, and of none there is none."""
    numbers = [value for value in values if not math.isnan(value)]
    return (min if minimize else max)(numbers, default=None)


def leader(trials: Iterable[Trial], *, minimize: bool) -> Trial | None:
    """Return the complete trial with the best value, of equals the first; None without one."""
    ranked = ranking(trials, minimize=minimize)
    return ranked[0] if ranked else None


def ranking(trials: Iterable[Trial], *, minimize: bool) -> list[Trial]:
    """Return the complete trials, the best first."""
    complete = [t for t in trials if t.state == "complete" and t.value is not None]
    return sorted(complete, key=lambda t: t.value or 0.0, reverse=not minimize)


def noted(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a trial that a ledger keeps as user attributes."""
    progress = attributes.get("progress", {})
    return {
        "attempts": int(attributes.get("attempts", 0)),
        "reason": attributes.get("reason"),
        "traceback": attributes.get("traceback"),
        "step": progress.get("step", 0),
        "epoch": progress.get("epoch", 0),
        "best_step": progress.get("best_step"),
        "best_epoch": progress.get("best_epoch"),
        "signals": tuple(attributes.get(SIGNALS, ())),
        "accumulation": attributes.get(ACCUMULATION),
    }


def attempts_in(attributes: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what a study's attributes say of each driver, in turn."""
    names = (f"{ATTEMPT}{number}" for number in itertools.count(1))
    return [attributes[name] for name in itertools.takewhile(attributes.__contains__, names)]


class LedgerView:
    """A ledger as it is at one moment, in a time that does not grow with the trials' curves.

    Args:
        path: The ledger's file.

    Raises:
        LedgerError: There is none, it is not readable as one, or a release of Optuna with other
            tables wrote it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(self._path) as db:
            self._check_schema(db)
            ((study, direction),) = db.execute(
                "SELECT study_id, direction FROM studies JOIN study_directions USING (study_id)"
            )
            attributes = dict(
                db.execute(
                    "SELECT key, value_json FROM study_user_attributes WHERE study_id = ?",
                    (study,),
                )
            )
            notes = {key: json.loads(text) for key, text in attributes.items()}
            self.minimize: bool = direction == "MINIMIZE"
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

    def best(self) -> TrialSummary | None:
        """The complete trial with the best value; None when none is complete."""
        return leader(self.trials, minimize=self.minimize)

    def records(self) -> list[TrialRecord]:
        """All trials with their curves.

        Raises:
            LedgerError: It can no longer be read.
        """
        curves = self.reports()
        return [TrialRecord(**vars(t), reports=curves[t.number]) for t in self.trials]

    def reports(self) -> dict[int, dict[int, float]]:
        """The metric after each reported epoch, by trial.

        Raises:
            LedgerError: It can no longer be read.
        """
        found: dict[int, dict[int, float]] = {trial.number: {} for trial in self.trials}
        with reading(self._path) as db:
            for number, epoch, value in db.execute(
                f"SELECT number, step, {_REPORTED} FROM trial_intermediate_values "
                "JOIN trials USING (trial_id) ORDER BY trial_id, step"
            ):
                if number in found:  # not one that was added after this view was taken
                    found[number][epoch] = math.nan if value is None else value
        return found

    def reports_of(self, number: int) -> dict[int, float]:
        """One trial's reports.

        Raises:
            LedgerError: It can no longer be read.
        """
        with reading(self._path) as db:
            return {
                epoch: math.nan if value is None else value
                for epoch, value in db.execute(
                    f"SELECT step, {_REPORTED} FROM trial_intermediate_values "
                    "JOIN trials USING (trial_id) WHERE number = ? ORDER BY step",
                    (number,),
                )
            }

    def _check_schema(self, db: sqlite3.Connection) -> None:
        ((number, library),) = db.execute(
            "SELECT schema_version, library_version FROM version_info"
        )
        ((revision,),) = db.execute("SELECT version_num FROM alembic_version")
        if (number, revision) != _SCHEMA:
            raise LedgerError(
                f"{self._path} has tables of version {number} ({revision}), by Optuna {library}; "
                f"this release reads version {_SCHEMA[0]} ({_SCHEMA[1]}); "
                "look at it with the release that wrote it"
            )

    def _read_trials(self, db: sqlite3.Connection) -> Iterator[TrialSummary]:
        params: dict[int, dict[str, Any]] = {}
        read = _Values()
        for trial, name, value, distribution in db.execute(
            "SELECT trial_id, param_name, param_value, distribution_json "
            "FROM trial_params ORDER BY param_id"
        ):
            params.setdefault(trial, {})[name] = read(value, distribution)
        attributes: dict[int, dict[str, Any]] = {}
        for trial, key, text in db.execute(
            "SELECT trial_id, key, value_json FROM trial_user_attributes"
        ):
            attributes.setdefault(trial, {})[key] = json.loads(text)
        pick = "MIN" if self.minimize else "MAX"
        # A complete trial was told its best report as its value: its curve need not be read.
        values = dict(
            db.execute(
                f"SELECT trial_id, {_TOLD} FROM trial_values UNION ALL "
                f"SELECT trial_id, {pick}({_REPORTED}) FROM trials "
                "CROSS JOIN trial_intermediate_values USING (trial_id) "
                "WHERE state != 'COMPLETE' GROUP BY trial_id"
            )
        )
        for trial, number, state, ended in db.execute(
            "SELECT trial_id, number, state, datetime_complete FROM trials ORDER BY number"
        ):
            yield TrialSummary(
                number=number,
                state=_STATES[state],
                params=params.get(trial, {}),
                value=values.get(trial),
                ended_at=datetime.fromisoformat(ended) if ended else None,
                **noted(attributes.get(trial, {})),
            )


class _Values:
    """Turns stored parameters into what they mean; few distributions belong to many values."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Any]] = {}

    def __call__(self, value: float, distribution: str) -> Any:
        if distribution not in self._known:
            data = json.loads(distribution)
            self._known[distribution] = data["name"], data["attributes"].get("choices")
        name, choices = self._known[distribution]
        match name:
            case "CategoricalDistribution":
                return choices[int(value)]
            case "IntDistribution":
                return int(value)
            case "FloatDistribution":
                return value
        raise ValueError(f"it holds a parameter of the unknown kind {name!r}")
