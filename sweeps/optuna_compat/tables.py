"""The tables of Optuna's `RDBStorage`, as SQL that runs without Optuna.

Importing Optuna and SQLAlchemy takes half a second, and commands that only look at a sweep need
neither. What must not live here: connections, and what the rows mean to a sweep (`ledger.reader`).

Parameters are written `:name`. A name in braces is filled in by `str.format`:

- `{number}`: SQL for a stored number; see `number_sql`.
- `{is_report}`: a condition on the column `key` of a trial's user attributes.
- `{pick}`: `MIN` or `MAX`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

SCHEMA = (12, "v3.2.0.a")
"""The version of the tables: Optuna's own number, and its newest Alembic migration."""
VERSION_QUERY = "SELECT schema_version, library_version FROM version_info"
"""Optuna's number of the tables' version, and the release that created them."""
REVISION_QUERY = "SELECT version_num FROM alembic_version"
"""The newest Alembic migration that the tables have had."""
STUDIES_TABLE = "studies"
"""A table that every complete storage has."""

DIRECTIONS_QUERY = (
    "SELECT study_id, direction FROM studies JOIN study_directions USING (study_id) "
    "WHERE study_name = :name ORDER BY objective"
)
"""A study's id and the direction of each objective, `MINIMIZE` or `MAXIMIZE`."""
STUDY_ATTRIBUTES_QUERY = (
    "SELECT key, value_json FROM study_user_attributes WHERE study_id = :study"
)
"""A study's user attributes."""
STUDY_SYSTEM_ATTRIBUTE_QUERY = (
    "SELECT value_json FROM study_system_attributes WHERE study_id = :study AND key = :key"
)
"""One system attribute of a study."""
ANY_STUDY_QUERY = "SELECT 1 FROM studies"
"""Whether there is a study."""
COUNT_TRIALS_QUERY = "SELECT COUNT(*) FROM trials"
"""How many trials all studies have."""

TRIALS_QUERY = (
    "SELECT trial_id, number, state, datetime_start, datetime_complete FROM trials "
    "WHERE study_id = :study ORDER BY number"
)
"""A study's trials; a state is the name of a `TrialState`, and a time is in UTC."""
PARAMS_QUERY = (
    "SELECT trial_id, param_name, param_value, distribution_json FROM trials "
    "JOIN trial_params USING (trial_id) WHERE study_id = :study ORDER BY trial_id, param_id"
)
"""The parameters of a study's trials; see `ParamDecoder`."""
ATTRIBUTES_QUERY = (
    "SELECT trial_id, key, value_json FROM trials "
    "JOIN trial_user_attributes USING (trial_id) WHERE study_id = :study AND NOT {is_report}"
)
"""The user attributes of a study's trials, without reports."""
SYSTEM_ATTRIBUTES_QUERY = (
    "SELECT trial_id, key, value_json FROM trials "
    "JOIN trial_system_attributes USING (trial_id) WHERE study_id = :study"
)
"""The system attributes of a study's trials."""
REPORTS_QUERY = (
    "SELECT number, step, {number} FROM trials "
    "JOIN trial_intermediate_values USING (trial_id) "
    "WHERE study_id = :study ORDER BY trial_id, step"
)
"""The intermediate values of a study's trials."""
REPORT_ATTRIBUTES_QUERY = (
    "SELECT number, key, value_json FROM trials "
    "JOIN trial_user_attributes USING (trial_id) "
    "WHERE study_id = :study AND {is_report} ORDER BY trial_id"
)
"""The reports that are user attributes, of a study's trials."""
BEST_VALUES_QUERY = (
    "SELECT trial_id, {number} FROM trials "
    "JOIN trial_values USING (trial_id) WHERE study_id = :study AND state = 'COMPLETE' UNION ALL "
    "SELECT trial_id, {pick}(intermediate_value) FROM trials "
    "JOIN trial_intermediate_values USING (trial_id) WHERE study_id = :study "
    "AND state != 'COMPLETE' AND intermediate_value_type = 'FINITE' GROUP BY trial_id"
)
"""The value of each complete trial, and the best intermediate value of each other one."""
LAST_VALUES_QUERY = (
    "SELECT trial_id, {number} FROM trials "
    "JOIN trial_values USING (trial_id) WHERE study_id = :study AND state = 'COMPLETE' UNION ALL "
    "SELECT trials.trial_id, intermediate_value FROM trials "
    "JOIN trial_intermediate_values AS report ON report.trial_id = trials.trial_id "
    "WHERE study_id = :study AND state != 'COMPLETE' AND intermediate_value_type = 'FINITE' "
    "AND step = (SELECT MAX(step) FROM trial_intermediate_values AS other "
    "WHERE other.trial_id = trials.trial_id)"
)
"""The value of each complete trial, and the last intermediate value of each other one if it is
finite."""
VALUES_QUERY = (
    "SELECT trial_id, {number} FROM trials JOIN trial_values USING (trial_id) "
    "WHERE study_id = :study ORDER BY trial_id, objective"
)
"""The values of each trial that has some. Optuna keeps the last report of a pruned one, too."""
UNFINISHED_REPORTS_QUERY = (
    "SELECT trial_id, key, value_json FROM trials "
    "JOIN trial_user_attributes USING (trial_id) "
    "WHERE study_id = :study AND state != 'COMPLETE' AND {is_report}"
)
"""The reports that are user attributes, of all trials that are not complete."""

ADD_VERSION = "INSERT INTO version_info VALUES (1, ?, ?)"
ADD_REVISION = "INSERT INTO alembic_version VALUES (?)"
ADD_STUDY = "INSERT INTO studies (study_name) VALUES (?)"
ADD_DIRECTION = "INSERT INTO study_directions (study_id, objective, direction) VALUES (?, ?, ?)"
_SET_ATTRIBUTE = (
    "INSERT INTO {table} ({owner}, key, value_json) VALUES (?, ?, ?) "
    "ON CONFLICT ({owner}, key) DO UPDATE SET value_json = excluded.value_json"
)
SET_STUDY_ATTRIBUTE = _SET_ATTRIBUTE.format(table="study_user_attributes", owner="study_id")
SET_STUDY_SYSTEM_ATTRIBUTE = _SET_ATTRIBUTE.format(
    table="study_system_attributes", owner="study_id"
)
ADD_TRIAL = (
    "INSERT INTO trials (study_id, number, state, datetime_start) VALUES (?, ?, 'RUNNING', ?)"
)
ADD_PARAM = (
    "INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json) "
    "VALUES (?, ?, ?, ?)"
)
SET_TRIAL_ATTRIBUTE = _SET_ATTRIBUTE.format(table="trial_user_attributes", owner="trial_id")
SET_TRIAL_SYSTEM_ATTRIBUTE = _SET_ATTRIBUTE.format(
    table="trial_system_attributes", owner="trial_id"
)
DROP_TRIAL_ATTRIBUTE = "DELETE FROM trial_user_attributes WHERE trial_id = ? AND key = ?"
ADD_INTERMEDIATE_VALUE = (
    "INSERT INTO trial_intermediate_values "
    "(trial_id, step, intermediate_value, intermediate_value_type) VALUES (?, ?, ?, ?)"
)
DROP_LATER_VALUES = "DELETE FROM trial_intermediate_values WHERE trial_id = ? AND step > ?"
ADD_VALUE = "INSERT INTO trial_values (trial_id, objective, value, value_type) VALUES (?, ?, ?, ?)"
SET_STATE = "UPDATE trials SET state = ?, datetime_complete = ? WHERE trial_id = ?"

INTERMEDIATE_VALUE = ("intermediate_value", "intermediate_value_type")
"""The two columns of an intermediate value, for `number_sql`."""
VALUE = ("value", "value_type")
"""The two columns of a trial's value, for `number_sql`."""


def number_sql(value: str, kind: str) -> str:
    """Return SQL for a stored number.

    Optuna keeps a number that is not finite as a kind in a second column; NaN stays NULL.
    """
    return (
        f"CASE {kind} WHEN 'FINITE' THEN {value} WHEN 'INF_POS' THEN 9e999 "
        "WHEN 'INF_NEG' THEN -9e999 END"
    )


def stored_number(value: float) -> tuple[float | None, str]:
    """Return the two columns of a stored number."""
    if math.isfinite(value):
        return value, "FINITE"
    return None, "NAN" if math.isnan(value) else "INF_POS" if value > 0 else "INF_NEG"


def schema() -> list[str]:
    """Return the statements that create the tables."""
    text = Path(__file__).with_name("tables.sql").read_text(encoding="utf-8")
    return text.split(";")


class ParamDecoder:
    """Decode stored parameters; few distributions belong to many values."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Any]] = {}

    def __call__(self, value: float, distribution: str) -> Any:
        """Return the value of a parameter."""
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
