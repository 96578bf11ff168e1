"""Trials and curves of a sweep as tables: the rows of `sweep trials`, DataFrames, CSV, Parquet.

What must not live here: what a trial is (`ledger.trials`), and tables for a terminal (`cli`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redaction.escapes import spreadsheet_cell
from sweeps.errors import UserError
from sweeps.formatting import quoted
from sweeps.ledger.attributes import ORIGIN_COLUMNS
from sweeps.path_checks import check_file, check_private, make_private
from sweeps.spec.error_messages import nearest
from sweeps.spec.spec import SweepSpec
from sweeps.view.sweep_view import STATES, SweepView
from trainable.store.metrics_file import CurveDamaged, read_row_at, read_rows
from trainable.store.notes import latest_tested
from trainable.store.regular_files import replace_regular

_SEED_COUNTS = ("configuration", "seed_index", "num_seeds")
_SEED_COLUMNS = (*_SEED_COUNTS, "over_seeds", "standard_error")
"""The columns that only a sweep with `repeats` has."""

if TYPE_CHECKING:
    import pandas as pd

    from sweeps.ledger.trials import TrialSummary


def trials_frame(view: SweepView) -> pd.DataFrame:
    """Return one row for each trial; see `Sweep.trials`."""
    import pandas as pd

    rows = []
    seeds = view.spec.repeats.seeds > 1
    keys = dict.fromkeys(view.spec.space)
    metrics: dict[str, None] = dict.fromkeys(view.spec.metrics)
    for record, row in zip(view.records, view.rows(), strict=True):
        params = row["params"]
        reported = best_metrics(view, record.number)
        keys.update(dict.fromkeys(params))
        metrics.update(dict.fromkeys(reported))
        rows.append(
            {
                "trial": record.number,
                "state": row["state"],
                **params,
                **dict(zip(view.spec.metrics, _own_values(record), strict=False)),
                **reported,
                **({"feasible": record.feasible} if record.limits else {}),
                "best_epoch": record.best_epoch,
                "best_step": record.best_step,
                "epochs": record.epoch,
                "steps": record.step,
                "started_at": record.started_at,
                "ended_at": record.ended_at,
                "seconds": record.seconds,
                "attempts": record.attempts,
                **record.origins,
                **(_of_seeds(record) if seeds else {}),
                "reason": record.reason,
                "run_id": row["mlflow_run_id"],
            }
        )
    ends = ["feasible"] * bool(view.spec.constraints)
    ends += ["best_epoch", "best_step", "epochs", "steps", "started_at", "ended_at", "seconds"]
    seed_columns = _SEED_COLUMNS if seeds else ()
    ends += ["attempts", *ORIGIN_COLUMNS.values(), *seed_columns, "reason", "run_id"]
    frame = pd.DataFrame(rows, columns=["trial", "state", *keys, *metrics, *ends])
    integers = ["best_epoch", "best_step", *ORIGIN_COLUMNS.values()]
    whole = dict.fromkeys([*integers, *(_SEED_COUNTS if seeds else ())], "Int64")
    return frame.astype(whole).set_index("trial")


def _own_values(record: TrialSummary) -> tuple[float, ...]:
    return record.values if record.over_seeds is None else record.over_seeds.own


def _of_seeds(record: TrialSummary) -> dict[str, Any]:
    """Return a trial's configuration and seed, and with the first seed the value over all."""
    found: dict[str, Any] = {
        "configuration": record.search_number,
        "seed_index": record.seed_index,
    }
    if record.over_seeds is not None:
        found["over_seeds"] = record.value
        found["standard_error"] = record.over_seeds.standard_error
        found["num_seeds"] = record.over_seeds.num_values
    return found


def leaders_frame(found: Mapping[str, Any]) -> pd.DataFrame:
    """Return one row for each leader of a comparison; see `Comparison.leaders`."""
    import pandas as pd

    several = not isinstance(found["metric"], str)
    metrics = found["metric"] if several else [found["metric"]]
    rows = [
        {
            "sweep": one["sweep"],
            "trial": one["number"],
            "state": one["state"],
            **dict(zip(metrics, one["value"] or () if several else [one["value"]], strict=False)),
            **({"pareto": one["pareto"]} if several else {}),
            "epochs": one["epoch"],
            "attempts": one["attempts"],
            "seconds": one["duration"],
            "clip_fraction": one["clip_fraction"],
            "run_id": one["mlflow_run_id"],
            **{name: one["params"].get(name) for name in found["differing"]},
        }
        for one in found["leaders"]
    ]
    more = ["pareto"] if several else []
    middle = ["epochs", "attempts", "seconds", "clip_fraction", "run_id"]
    columns = ["sweep", "trial", "state", *metrics, *more, *middle, *found["differing"]]
    return pd.DataFrame(rows, columns=columns).set_index(["sweep", "trial"])


def best_metrics(view: SweepView, number: int) -> dict[str, float]:
    """Return all metrics of a trial's best report that its file has, and those on test data."""
    tested = latest_tested(view.paths.trial(number))
    return _reported(view, number) | ({} if tested is None else tested.metrics)


def _reported(view: SweepView, number: int) -> dict[str, float]:
    step = view.records[number].best_step
    if step is None:
        return {}
    try:
        row = read_row_at(view.paths.trial(number), step)
    except (CurveDamaged, OSError):
        return {}
    return {} if row is None else row.metrics


def curves_frame(view: SweepView, numbers: Iterable[int], metrics: Sequence[str]) -> pd.DataFrame:
    """Return one row for each trial, step and metric; see `Sweep.curves`."""
    import pandas as pd

    trials, steps, names, values = [], [], [], []
    for number in numbers:
        rows = read_rows(view.paths.trial(number))
        for index, name in enumerate(metrics):
            reported = [(row.step, row.metrics[name]) for row in rows if name in row.metrics]
            trials += [number] * len(reported)
            names += [index] * len(reported)
            steps += [step for step, _ in reported]
            values += [value for _, value in reported]
    return pd.DataFrame(
        {
            "trial": pd.Series(trials, dtype="int64"),
            "metric": pd.Categorical.from_codes(names, list(metrics)),
            "step": pd.Series(steps, dtype="int64"),
            "value": pd.Series(values, dtype="float64"),
        }
    )


def write_tables(view: SweepView, directory: Path, kind: str) -> list[Path]:
    """Write `trials` and `curves` of a sweep into a directory."""
    targets = [directory / f"{stem}.{kind}" for stem in ("trials", "curves")]
    check_private(directory, f"--{kind}")
    for target in targets:
        check_file(target, f"--{kind}")
    frames = [
        trials_frame(view).reset_index(),
        curves_frame(view, range(len(view.records)), view.spec.metrics),
    ]
    # Made whole before a file is: pandas takes some paths for addresses.
    tables = [_csv(frame) if kind == "csv" else frame.to_parquet() for frame in frames]
    with make_private(directory, f"--{kind}") as place:
        for table, target in zip(tables, targets, strict=True):
            replace_regular(place / target.name, table)
    return targets


def _csv(frame: pd.DataFrame) -> bytes:
    """Return a table as CSV, which a spreadsheet shows as it is."""
    texts = frame.select_dtypes(exclude=["number", "bool", "datetime", "datetimetz"])
    frame = frame.assign(**{name: texts[name].map(spreadsheet_cell) for name in texts})
    text: str = frame.to_csv(index=False, header=[*map(spreadsheet_cell, frame)])
    return text.encode()


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
    """Return the rows to show, in their order; the best first if only their number is given."""
    if top is not None and sort is None:
        sort = "value"
    if state is not None and state not in STATES:
        raise UserError(_unknown("--state", state, STATES, "state of a trial"))
    found = [row for row in rows if state in (None, row["state"])]
    if sort is not None:
        key, sign = _column(sort, spec)
        found.sort(key=lambda row: _sort_key(_cell(row, key, spec), sign))
    return found[:top]


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
