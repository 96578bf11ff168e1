"""Keep a ledger's study in memory and in Optuna's tables: read once, written change by change.

Stored data survives a power loss, and each parameter has its own distribution, so that the search
space may change between two drivers. What must not live here: what a ledger stores (`ledger`),
and SQL (`optuna_compat.tables`).
"""

from __future__ import annotations

import copy
import functools
import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, distribution_to_json, json_to_distribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeps.ledger.sqlite import STUDY, LedgerFile, param_rows, report_rows, trial_rows
from sweeps.optuna_compat import tables

_T = TypeVar("_T")
_distribution = functools.lru_cache(json_to_distribution)


@dataclass(frozen=True)
class _Study:
    """What the tables hold; a trial that changes is replaced by another object."""

    key: int
    directions: list[StudyDirection]
    attributes: dict[str, Any]
    trials: list[FrozenTrial]
    trial_keys: list[int]


class StudyStorage:
    """A study that one thread at a time writes.

    What another connection has written is seen from the next transaction on.
    """

    def __init__(self, location: LedgerFile) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._location = location
        self._db = location.connect()
        self._writes = False
        self._known: _Study | None = None
        self._version = 0

    def transact(self, work: Callable[[], _T]) -> _T:
        """Run `work` in one transaction; a nested call is a part of the outer transaction."""
        if self._writes:
            return work()
        with self._location.errors():
            return self._transact(work)

    def _transact(self, work: Callable[[], _T]) -> _T:
        self._writes = True
        try:
            self._db.execute("BEGIN IMMEDIATE")
            if self._version != self._data_version():
                self._known = None
            done = work()
            self._db.execute("COMMIT")
        except BaseException:  # also on an interruption: it is rolled back; raised again
            self._known = None
            if self._db.in_transaction:  # SQLite itself rolls back when the disk is full
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._writes = False
        return done

    # -- The study --------------------------------------------------------------------------------

    def create(self, directions: Iterable[StudyDirection]) -> None:
        """Create the tables, and the study in them."""
        for statement in tables.schema():
            self._db.execute(statement)
        number, revision = tables.SCHEMA
        self._db.execute(tables.ADD_VERSION, (number, optuna.__version__))
        self._db.execute(tables.ADD_REVISION, (revision,))
        key = self._db.execute(tables.ADD_STUDY, (STUDY,)).lastrowid
        rows = [(key, objective, one.name) for objective, one in enumerate(directions)]
        self._db.executemany(tables.ADD_DIRECTION, rows)

    @property
    def directions(self) -> list[StudyDirection]:
        """Whether less or more of each metric is better."""
        return self._study.directions

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The study's user attributes."""
        return self._study.attributes

    def set_study_attribute(self, key: str, value: Any) -> None:
        """Store a user attribute of the study."""
        text = json.dumps(value)
        self._db.execute(tables.SET_STUDY_ATTRIBUTE, (self._study.key, key, text))
        self._study.attributes[key] = json.loads(text)

    def system_attribute(self, key: str) -> Any:
        """Read a system attribute of the study; None without one."""
        query, asked = tables.STUDY_SYSTEM_ATTRIBUTE_QUERY, {"study": self._study.key, "key": key}
        with self._location.decoding():
            found = self._db.execute(query, asked).fetchone()
            return None if found is None else json.loads(found[0])

    def set_system_attribute(self, key: str, value: Any) -> None:
        """Store a system attribute of the study."""
        row = (self._study.key, key, json.dumps(value))
        self._db.execute(tables.SET_STUDY_SYSTEM_ATTRIBUTE, row)

    # -- Its trials -------------------------------------------------------------------------------

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, in the order of their numbers. An unchanged trial is the same object."""
        return list(self._study.trials)

    def trial(self, number: int) -> FrozenTrial:
        """Return one trial."""
        return self._study.trials[number]

    def add_trial(
        self,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        attributes: Mapping[str, Any],
        system_attributes: Mapping[str, Any],
    ) -> int:
        """Create the next trial, which runs from now on, and return its number."""
        study, now = self._study, datetime.now()
        number = len(study.trials)
        row = (study.key, number, _stored_time(now))
        key = self._db.execute(tables.ADD_TRIAL, row).lastrowid
        assert key is not None
        trial = _trial(number, key, TrialState.RUNNING, now, None)
        for name, value in system_attributes.items():
            text = json.dumps(value)
            self._db.execute(tables.SET_TRIAL_SYSTEM_ATTRIBUTE, (key, name, text))
            trial.system_attrs[name] = json.loads(text)
        study.trials.append(trial)
        study.trial_keys.append(key)
        for name, distribution in distributions.items():
            self.set_param(number, name, params[name], distribution)
        for name, value in attributes.items():
            self.set_attribute(number, name, value)
        return number

    def set_param(
        self, number: int, name: str, value: Any, distribution: BaseDistribution
    ) -> None:
        """Store a parameter that a trial lacks."""
        stored, text = distribution.to_internal_repr(value), distribution_to_json(distribution)
        key = self._study.trial_keys[number]
        self._db.execute(tables.ADD_PARAM, (key, name, stored, text))
        trial, kept = self.trial(number), _distribution(text)
        self._change(
            number,
            distributions={**trial.distributions, name: kept},
            params={**trial.params, name: kept.to_external_repr(stored)},
        )

    def set_attribute(self, number: int, name: str, value: Any) -> None:
        """Store a user attribute of a trial."""
        key, text = self._study.trial_keys[number], json.dumps(value)
        self._db.execute(tables.SET_TRIAL_ATTRIBUTE, (key, name, text))
        kept = {**self.trial(number).user_attrs, name: json.loads(text)}
        self._change(number, user_attrs=kept)

    def add_value(self, number: int, epoch: int, value: float) -> None:
        """Store the value that a trial reports after an epoch."""
        key = self._study.trial_keys[number]
        row = (key, epoch, *tables.stored_number(value))
        self._db.execute(tables.ADD_INTERMEDIATE_VALUE, row)
        kept = {**self.trial(number).intermediate_values, epoch: value}
        self._change(number, intermediate_values=kept)

    def end_trial(self, number: int, state: TrialState, values: Sequence[float]) -> None:
        """Store how a trial ended, and its values, if it has any."""
        key, now = self._study.trial_keys[number], datetime.now()
        for objective, value in enumerate(values):
            row = (key, objective, *tables.stored_number(value))
            self._db.execute(tables.ADD_VALUE, row)
        self._db.execute(tables.SET_STATE, (state.name, _stored_time(now), key))
        self._change(number, state=state, datetime_complete=now, values=[*values] or None)

    def reopen_trial(self, number: int, *, last_report: int, drop: Collection[str]) -> None:
        """Make a failed trial RUNNING again, without its later reports and some attributes."""
        key, trial = self._study.trial_keys[number], self.trial(number)
        self._db.execute(tables.SET_STATE, (TrialState.RUNNING.name, None, key))
        self._db.execute(tables.DROP_LATER_VALUES, (key, last_report))
        self._db.executemany(tables.DROP_TRIAL_ATTRIBUTE, [(key, name) for name in drop])
        reports, attributes = trial.intermediate_values, trial.user_attrs
        self._replace(
            number,
            state=TrialState.RUNNING,
            datetime_complete=None,
            intermediate_values={e: v for e, v in reports.items() if e <= last_report},
            user_attrs={name: v for name, v in attributes.items() if name not in drop},
        )

    def _change(self, number: int, **changed: Any) -> None:
        assert not self.trial(number).state.is_finished()
        self._replace(number, **changed)

    def _replace(self, number: int, **changed: Any) -> None:
        trial = copy.copy(self.trial(number))
        for name, value in changed.items():
            setattr(trial, name, value)
        self._study.trials[number] = trial

    @property
    def _study(self) -> _Study:
        if self._known is None:
            with self._location.decoding():
                self._version = self._data_version()
                self._known = _read(self._db)
        return self._known

    def _data_version(self) -> int:
        """Return a number that changes when another connection has written."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])


def _read(db: sqlite3.Connection) -> _Study:
    """Read the study and all of its trials with their curves."""
    objectives = db.execute(tables.DIRECTIONS_QUERY, {"name": STUDY}).fetchall()
    study = {"study": objectives[0][0]}
    attributes = db.execute(tables.STUDY_ATTRIBUTES_QUERY, study)
    known = {
        key: _trial(number, key, TrialState[state], _local_time(began), _local_time(ended))
        for key, number, state, began, ended in trial_rows(db, study)
    }
    for key, name, stored, text in param_rows(db, study):
        distribution = _distribution(text)
        known[key].distributions[name] = distribution
        known[key].params[name] = distribution.to_external_repr(stored)
    for key, name, text in db.execute(tables.ATTRIBUTES_QUERY.format(is_report="0"), study):
        known[key].user_attrs[name] = json.loads(text)
    for key, name, text in db.execute(tables.SYSTEM_ATTRIBUTES_QUERY, study):
        known[key].system_attrs[name] = json.loads(text)
    trials = list(known.values())
    for number, epoch, value in report_rows(db, study):
        trials[number].intermediate_values[epoch] = value
    values = tables.VALUES_QUERY.format(number=tables.number_sql(*tables.VALUE))
    for key, value in db.execute(values, study):
        known[key].values = [*(known[key].values or ()), float(value)]
    return _Study(
        key=study["study"],
        directions=[StudyDirection[direction] for _, direction in objectives],
        attributes={name: json.loads(text) for name, text in attributes},
        trials=trials,
        trial_keys=list(known),
    )


def _trial(
    number: int,
    key: int,
    state: TrialState,
    began: datetime | None,
    ended: datetime | None,
) -> FrozenTrial:
    """Return a trial without values, parameters and attributes."""
    return FrozenTrial(
        number=number,
        state=state,
        value=None,
        datetime_start=began,
        datetime_complete=ended,
        params={},
        distributions={},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
        trial_id=key,
    )


def _stored_time(at: datetime) -> str:
    """Return a time as Optuna stores it: in UTC, without the zone."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


def _local_time(stored: str | None) -> datetime | None:
    if stored is None:
        return None
    return datetime.fromisoformat(stored).replace(tzinfo=UTC).astimezone().replace(tzinfo=None)
