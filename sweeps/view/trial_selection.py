"""Sort and filter the rows of `sweep trials`.

What must not live here: reading a sweep (`sweep_status`), and tables (`cli.render`).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from redaction.escapes import spreadsheet_cell
from sweeps.errors import UserError
from sweeps.formatting import quoted
from sweeps.ledger.attributes import ORIGIN_COLUMNS
from sweeps.spec.error_messages import nearest
from sweeps.spec.spec import SweepSpec
from sweeps.view.sweep_status import STATES

_COLUMNS = (
    "number",
    "epoch",
    "step",
    "attempts",
    "duration",
    "state",
    "started_at",
    "ended_at",
)


def select_rows(
    rows: Sequence[dict[str, Any]],
    spec: SweepSpec,
    *,
    sort: str | None = None,
    top: int | None = None,
    state: str | None = None,
) -> list[dict[str, Any]]:
    """Return the rows to show, in their order."""
    if state is not None and state not in STATES:
        raise UserError(_unknown("--state", state, STATES, "state of a trial"))
    found = [row for row in rows if state in (None, row["state"])]
    if sort is not None:
        key, sign = _column(sort, spec)
        found.sort(key=lambda row: _sort_key(_cell(row, key, spec), sign))
    return found[:top]


def to_csv(rows: Sequence[dict[str, Any]], spec: SweepSpec) -> str:
    """Return the rows as CSV, with a column for each metric and each parameter."""
    keys = list(spec.space)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first = ["number", "state"]
    last = [
        "attempts",
        *ORIGIN_COLUMNS.values(),
        "reason",
        "started_at",
        "ended_at",
        "duration",
        "mlflow_run_id",
    ]
    writer.writerow(map(spreadsheet_cell, [*first, *spec.metrics, "epoch", "step", *keys, *last]))
    for row in rows:
        values = row["value"] if isinstance(row["value"], list) else [row["value"]]
        values += [None] * (len(spec.metrics) - len(values))
        origins = {
            column: row["origin"] if row["role"] == role else None
            for role, column in ORIGIN_COLUMNS.items()
        }
        cells = [
            *(row[name] for name in first),
            *values,
            *(row["epoch"], row["step"]),
            *(row["params"].get(key) for key in keys),
            *(origins[name] if name in origins else row[name] for name in last),
        ]
        writer.writerow(map(spreadsheet_cell, cells))
    return text.getvalue()


def _column(name: str, spec: SweepSpec) -> tuple[str, int]:
    """Return the column that a name means, and -1 if its largest number comes first, else 1."""
    if name == spec.budget.report_word:  # as the table calls the column
        return "epoch", 1
    if name in ("value", *spec.metrics):
        metric = spec.metrics[0] if name == "value" else name
        return metric, -1 if spec.modes[spec.metrics.index(metric)] == "max" else 1
    ends = [key for key in spec.space if key == name or key.endswith(f".{name}")]
    if name in _COLUMNS or len(ends) == 1:
        return (name if name in _COLUMNS else ends[0]), 1
    if len(ends) > 1:
        raise UserError(
            f"--sort: {quoted(name)} names {len(ends)} parameters; write one in full: "
            f"{', '.join(ends)}"
        )
    known = [spec.budget.report_word if one == "epoch" else one for one in _COLUMNS]
    columns = ["value", *spec.metrics, *known, *spec.space]
    raise UserError(_unknown("--sort", name, columns, "column"))


def _cell(row: dict[str, Any], key: str, spec: SweepSpec) -> Any:
    if key in spec.metrics:
        value = row["value"]
        return value[spec.metrics.index(key)] if isinstance(value, list) else value
    return row["params"].get(key) if key in spec.space else row[key]


def _sort_key(cell: Any, sign: int) -> tuple[int, float, str]:
    """Return a key that orders numbers before texts, and missing values last."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return 2, 0.0, ""
    if isinstance(cell, int | float):
        return 0, sign * float(cell), ""
    return 1, 0.0, str(cell)


def _unknown(option: str, word: str, known: Sequence[str], what: str) -> str:
    close = nearest(word, [*known, *(name.rpartition(".")[2] for name in known)])
    hint = f" (did you mean {quoted(close)}?)" if close else ""
    return f"{option}: {quoted(word)} is no {what}{hint}; write one of: {', '.join(known)}"
