"""The tables of Optuna's `RDBStorage`, as queries that run without Optuna.

Importing Optuna and SQLAlchemy takes half a second, and commands that only look at a sweep need
neither. What must not live here: connections, and what the rows mean to a sweep (`ledger.reader`).

Parameters are written `:name`. A name in braces is filled in by `str.format`:

- `{number}`: SQL for a stored number; see `number_sql`.
- `{is_report}`: a condition on the column `key` of a trial's user attributes.
- `{pick}`: `MIN` or `MAX`.
"""

from __future__ import annotations

import json
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
    "SELECT trial_id, number, state, datetime_complete FROM trials "
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
REPORTS_QUERY = (
    "SELECT number, step, {number} FROM trials "
    "JOIN trial_intermediate_values USING (trial_id) "
    "WHERE study_id = :study AND (:number IS NULL OR number = :number) ORDER BY trial_id, step"
)
"""The intermediate values of one trial, or of all."""
REPORT_ATTRIBUTES_QUERY = (
    "SELECT number, key, value_json FROM trials "
    "JOIN trial_user_attributes USING (trial_id) WHERE {is_report} "
    "AND study_id = :study AND (:number IS NULL OR number = :number) ORDER BY trial_id"
)
"""The reports that are user attributes, of one trial or of all."""
BEST_VALUES_QUERY = (
    "SELECT trial_id, {number} FROM trials "
    "JOIN trial_values USING (trial_id) WHERE study_id = :study UNION ALL "
    "SELECT trial_id, {pick}(intermediate_value) FROM trials "
    "JOIN trial_intermediate_values USING (trial_id) WHERE study_id = :study "
    "AND state != 'COMPLETE' AND intermediate_value_type = 'FINITE' GROUP BY trial_id"
)
"""The value of each complete trial, and the best intermediate value of each other one."""
LAST_VALUES_QUERY = (
    "SELECT trial_id, {number} FROM trials "
    "JOIN trial_values USING (trial_id) WHERE study_id = :study UNION ALL "
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
"""The values of each complete trial."""
UNFINISHED_REPORTS_QUERY = (
    "SELECT trial_id, key, value_json FROM trials "
    "JOIN trial_user_attributes USING (trial_id) "
    "WHERE study_id = :study AND state != 'COMPLETE' AND {is_report}"
)
"""The reports that are user attributes, of all trials that are not complete."""

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
