"""What a trial's life writes into Optuna's tables, a statement for each table that it touches.

Optuna's own storage asks before each value whether the trial may still be changed, through the
objects of an ORM; the one driver that writes knows. What must not live here: transactions, and
what is remembered of a trial (`ledger.storage`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy
from optuna.distributions import distribution_to_json
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages._rdb.models import (
    TrialIntermediateValueModel,
    TrialModel,
    TrialParamModel,
    TrialSystemAttributeModel,
    TrialUserAttributeModel,
    TrialValueModel,
)
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

_INSERT: Mapping[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def insert_trial(session: Session, study_id: int, template: FrozenTrial) -> FrozenTrial:
    """Add a running trial with its parameters; returns it as it would be read."""
    assert template.state is TrialState.RUNNING
    assert template.datetime_start is not None
    trials = TrialModel.__table__
    number = session.scalars(
        sqlalchemy.select(sqlalchemy.func.count()).where(trials.c.study_id == study_id)
    ).one()
    trial_id = session.scalar(
        trials.insert().returning(trials.c.trial_id),
        {
            "number": number,
            "study_id": study_id,
            "state": TrialState.RUNNING,
            "datetime_start": _stored_time(template.datetime_start),
        },
    )
    params = {
        name: template.distributions[name].to_internal_repr(value)
        for name, value in template.params.items()
    }
    if params:
        session.execute(
            TrialParamModel.__table__.insert(),
            [
                {
                    "trial_id": trial_id,
                    "param_name": name,
                    "param_value": value,
                    "distribution_json": distribution_to_json(template.distributions[name]),
                }
                for name, value in params.items()
            ],
        )
    if template.system_attrs:
        session.execute(
            TrialSystemAttributeModel.__table__.insert(),
            [
                {"trial_id": trial_id, "key": key, "value_json": json.dumps(value)}
                for key, value in template.system_attrs.items()
            ],
        )
    trial = copy.copy(template)
    trial.number, trial._trial_id = number, trial_id
    trial.params = {
        name: template.distributions[name].to_external_repr(value)
        for name, value in params.items()
    }
    trial.system_attrs = {
        key: json_roundtrip(value) for key, value in template.system_attrs.items()
    }
    return trial


def set_user_attribute(session: Session, trial_id: int, key: str, value: Any) -> None:
    """Store an attribute, whatever it was before."""
    attributes = TrialUserAttributeModel.__table__
    insert = _INSERT[session.get_bind().dialect.name](attributes)
    session.execute(
        insert.on_conflict_do_update(
            index_elements=[attributes.c.trial_id, attributes.c.key],
            set_={"value_json": insert.excluded.value_json},
        ),
        {"trial_id": trial_id, "key": key, "value_json": json.dumps(value)},
    )


def insert_report(session: Session, trial_id: int, step: int, value: float) -> None:
    """Add a report of a step that has none."""
    stored, kind = TrialIntermediateValueModel.intermediate_value_to_stored_repr(value)
    session.execute(
        TrialIntermediateValueModel.__table__.insert(),
        {
            "trial_id": trial_id,
            "step": step,
            "intermediate_value": stored,
            "intermediate_value_type": kind,
        },
    )


def end_trial(
    session: Session, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
) -> FrozenTrial:
    """Give a running trial its end; returns it as it would be read.

    Raises:
        UpdateFinishedTrialError: It has one.
    """
    trials = TrialModel.__table__
    now = datetime.now()
    changed = session.execute(
        trials.update()
        .where(trials.c.trial_id == trial._trial_id, trials.c.state == TrialState.RUNNING)
        .values(state=state, datetime_complete=_stored_time(now))
    )
    if changed.rowcount != 1:  # type: ignore[attr-defined]
        raise UpdateFinishedTrialError(f"trial {trial.number} has its end already")
    if values is not None:
        stored = [TrialValueModel.value_to_stored_repr(value) for value in values]
        session.execute(
            TrialValueModel.__table__.insert(),
            [
                {
                    "trial_id": trial._trial_id,
                    "objective": objective,
                    "value": value,
                    "value_type": kind,
                }
                for objective, (value, kind) in enumerate(stored)
            ],
        )
    ended = copy.copy(trial)
    ended.state, ended.datetime_complete = state, now
    ended.values = None if values is None else list(values)
    return ended


def json_roundtrip(value: Any) -> Any:
    """Return an attribute as it is read: a tuple is a list, for example."""
    return json.loads(json.dumps(value))


def _stored_time(local: datetime) -> datetime:
    """Return a naive local time as Optuna stores it: naive, in UTC."""
    return local.astimezone(UTC).replace(tzinfo=None)
