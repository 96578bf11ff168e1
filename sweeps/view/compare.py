"""Compare the best trials of one or several sweeps: values, parameters, differences.

What must not live here: printing, and requests to the tracking server.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.ledger.ranking import front, ranking
from sweeps.ledger.trials import TrialSummary
from sweeps.recording.trial_config import load_trial_config
from sweeps.spec.searched_workers import WORKERS
from sweeps.spec.trial_run import flatten
from sweeps.view.mlflow_pages import pages_of_trials
from sweeps.view.sweep_view import SweepView
from trainable.store.metrics_file import read_rows

CLIPPED = "train/clip_fraction"
_CONFIGURATION = ("budget.", "checkpoint.", "patience", "task.", "train.")
"""Prefixes of the parameters on which a trial's result may depend."""

_ABSENT = object()
"""Stands for a parameter that a trial does not have, unlike one whose value is null."""


class Incomparable(ValueError):
    """The sweeps have different metrics, modes or meanings of a trial's value."""


def compare(views: Sequence[SweepView], *, top: int) -> dict[str, Any]:
    """Return the object that `sweep compare --json` prints."""
    first = views[0].spec
    for view in views[1:]:
        if view.spec.select != first.select:
            raise Incomparable(
                f"'{first.name}' has select: {first.select}, '{view.spec.name}' select: "
                f"{view.spec.select}; best and last values have no common order; compare the "
                "sweeps one by one"
            )
        if (view.spec.metric, view.spec.mode) != (first.metric, first.mode):
            raise Incomparable(
                f"'{first.name}' searches the {first.objective_description}, '{view.spec.name}' "
                f"the {view.spec.objective_description}; only values of one metric have an "
                "order; compare the sweeps one by one"
            )
    # Compared by identity: trials of two sweeps may be equal.
    best = set(map(id, front((r for v in views for r in v.records), views[0].ledger.minimizes)))
    chosen = [(view, record) for view in views for record in leaders(view, top)]
    chosen.sort(key=lambda pair: (id(pair[1]) not in best, *_order(*pair)))
    rows = [
        _row(view, record) | ({"pareto": id(record) in best} if view.several else {})
        for view, record in chosen
    ]
    names = dict.fromkeys(name for row in rows for name in row["params"])
    values = {name: [row["params"].get(name, _ABSENT) for row in rows] for name in names}
    differing = [name for name in names if not _one(values[name])]
    searched = {name for view in views for name in view.spec.space}
    return {
        "metric": first.metric,
        "mode": first.mode,
        "leaders": rows,
        "differing": differing,
        "same": {n: values[n][0] for n in names if n in searched and n not in differing},
        **pages_of_trials(views, rows, first.metrics),
    }


def leaders(view: SweepView, top: int) -> list[TrialSummary]:
    """Return a sweep's best trials: the Pareto front, others with a result, then all others."""
    best = view.ledger.front()
    ranked = ranking(view.records, minimize=view.ledger.minimize)
    # A further seed is part of its configuration, which its first seed stands for.
    single = [r for r in view.records if r.role != "repeat" and r.value is not None]
    # Values of running trials are not final, and those of failed ones may not be sound.
    others = [r for r in single if r not in ranked]
    others.sort(key=lambda record: _order(view, record))
    return [*best, *(r for r in ranked if r not in best), *others][:top]


def differences(view: SweepView, first: int, second: int) -> dict[str, Any]:
    """Return the object that `sweep show --diff --json` prints."""
    records = [view.record(number) for number in (first, second)]
    a, b = (resolved(view, record) for record in records)
    names = [name for name in {**a, **b} if not _one([a.get(name, _ABSENT), b.get(name, _ABSENT)])]
    return {
        "trials": [first, second],
        "values": [record.result for record in records],
        "differing": {name: [a.get(name), b.get(name)] for name in names},
        "absent": [[name for name in names if name not in one] for one in (a, b)],
    }


def clip_fraction(directory: Path) -> float | None:
    """Return the fraction of a trial's steps with clipped gradients; None if it logged none."""
    shares = [row.metrics[CLIPPED] for row in read_rows(directory) if CLIPPED in row.metrics]
    return statistics.fmean(shares) if shares else None


def resolved(view: SweepView, record: TrialSummary) -> dict[str, Any]:
    """Return all parameters that a trial was trained with, by dotted key."""
    config = load_trial_config(view.paths, view.spec, record)
    found = {k: value for k, value in flatten(config) if k.startswith(_CONFIGURATION)}
    return found | {WORKERS: config.get("workers", 1)}


def _one(values: Sequence[Any]) -> bool:
    """Return whether all values are equal, where 1 and True are not."""
    first = values[0]
    return all(v == first and isinstance(v, bool) == isinstance(first, bool) for v in values)


def _order(view: SweepView, record: TrialSummary) -> tuple[bool, float]:
    value = record.value or 0.0
    return not record.has_result, value if view.ledger.minimize else -value


def _row(view: SweepView, record: TrialSummary) -> dict[str, Any]:
    return {
        "sweep": view.paths.name,
        "number": record.number,
        "state": view.trial_state(record),
        "value": record.result,
        "epoch": record.epoch,
        "attempts": record.attempts,
        "duration": record.seconds,
        "clip_fraction": clip_fraction(view.paths.trial(record.number)),
        "params": resolved(view, record),
        "mlflow_run_id": view.delivered.run_ids.get(record.number),
    }
