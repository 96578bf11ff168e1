"""The tables of the field. What must not live here: measuring, and statistics (`measures.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.bench.field.grounds import Ground, ground, names
from tests.bench.field.measures import (
    NEAR,
    Ratio,
    area,
    by_problem,
    curve,
    interval,
    kept_from,
    median_lead,
    median_ratio,
    ranks,
    regret_at,
)
from tests.bench.field.searches import OURS, PEERS
from tests.bench.quality_table import ruled
from tests.bench.rows_file import Row

Value = Callable[[Row], float]


def epochs_to(row: Row, level: Callable[[Ground], float] = lambda one: one.level) -> float:
    """Return the epochs until a search keeps the target; all of them if it never does."""
    where = ground(row["problem"])
    found = kept_from(row["path"], level(where))
    return float(found[0] if found else where.horizon)


def regret_after(row: Row, trainings: int) -> float:
    """Return the regret after so many full trainings, at most 1e9."""
    return min(regret_at(row["path"], trainings * ground(row["problem"]).epochs), 1e9)


def area_of(row: Row) -> float:
    """Return the mean logarithm of regret over the budget."""
    return area(row["path"], ground(row["problem"]).budget)


MEASURES: dict[str, tuple[Value, str]] = {
    "epochs until the target is kept": (epochs_to, ".0f"),
    "epochs until the best is kept": (
        lambda row: epochs_to(row, lambda one: min(NEAR, one.level)),
        ".0f",
    ),
    "regret after 3 trainings": (lambda row: regret_after(row, 3), ".3f"),
    "regret after 10 trainings": (lambda row: regret_after(row, 10), ".3f"),
    "mean log10 of regret over 10 trainings": (area_of, ".2f"),
}


def show_all(rows: Sequence[Row]) -> None:
    """Print all tables."""
    rows = latest(rows)
    for workers in sorted({row["workers"] for row in rows}):
        for title, (value, form) in MEASURES.items():
            show(rows, workers, title, value, form)
        show_ratios(rows, workers)
    show_costs(rows)


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of problems as they are now: what has grown is measured again."""
    now = {row["problem"]: ground(row["problem"]) for row in rows}
    sizes = {name: (one.size, one.horizon) for name, one in now.items()}
    return [
        row for row in rows if sizes[row["problem"]] == (row["configurations"], row.get("horizon"))
    ]


def show(rows: Sequence[Row], workers: int, title: str, value: Value, form: str) -> None:
    """Print a line for each search, with a column for each problem and the mean rank."""
    found = by_problem(rows, workers, value)
    problems = [name for name in names() if name in found]
    if not problems:
        return
    searches = list(found[problems[0]])
    medians = {one: [interval(found[name][one])[0] for name in problems] for one in searches}
    ranked = ranks(medians)  # type: ignore[arg-type]
    heads = [f"{name} ({len(found[name][searches[0]])})" for name in problems]
    lines = [("search", "rank", *heads)]
    for one in sorted(searches, key=ranked.mean.__getitem__):
        cells = []
        for name in problems:
            middle, low, high = (format(end, form) for end in interval(found[name][one]))
            cells.append(f"{middle} [{low}, {high}]")
        lines.append((one, f"{ranked.mean[one]:.1f}", *cells))
    holdout = ", ".join(name for name in problems if ground(name).holdout)
    print(f"{title}; {workers} workers; medians [95 %], (replications); held out: {holdout}")
    print(
        f"mean ranks closer than {ranked.critical:.1f} are not told apart (Nemenyi, 5 %); "
        f"Friedman's p {ranked.p:.2g}\n"
    )
    print(ruled(lines), end="\n\n")


class Against(NamedTuple):
    """Ours against a peer, in the median over problems.

    Attributes:
        target: The peer's epochs until it keeps the target, divided by ours.
        held_out: The same over the problems that are held out.
        lead: The same for what the worse of both shows at the end, which no budget cuts.
    """

    target: Ratio
    held_out: Ratio | None
    lead: Ratio


def against(rows: Sequence[Row], workers: int, ours: str) -> dict[str, Against]:
    """Compare one of ours with each peer."""
    rows = latest(rows)
    costs = by_problem(rows, workers, epochs_to)
    curves = by_problem(
        rows, workers, lambda row: curve(row["path"], ground(row["problem"]).budget)
    )
    held = [name for name in costs if ground(name).holdout]
    found = {}
    for peer in (one for one in PEERS if any(one in values for values in costs.values())):
        both = peer, ours
        target, held_out = (
            median_ratio(*([[costs[name][one] for name in problems] for one in both]))
            if problems
            else None
            for problems in (list(costs), held)
        )
        assert target is not None
        ahead = median_lead(*([[curves[name][one] for name in curves] for one in both]))
        found[peer] = Against(target, held_out, ahead)
    return found


def show_ratios(rows: Sequence[Row], workers: int) -> None:
    """Print what each peer needs, divided by what each of ours needs."""
    there = {row["search"] for row in rows if row["workers"] == workers}
    for ours in (one for one in OURS if one in there):
        lines = [("peer", "to the target", "held out", "to the worse end")]
        for peer, one in against(rows, workers, ours).items():
            lines.append((peer, _written(one.target), _written(one.held_out), _written(one.lead)))
        print(f"epochs of the peer / of {ours}; {workers} workers; medians over problems (95 %)\n")
        print(ruled(lines), end="\n\n")


def _written(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def show_costs(rows: Sequence[Row]) -> None:
    """Print how many searches were measured, what a suggestion took, and how many failed."""
    lines = [("search", "searches", "jobs", "CPU per job (ms)", "failed", "why")]
    for one in dict.fromkeys(row["search"] for row in rows):
        chosen = [row for row in rows if row["search"] == one]
        failed = [row["failed"] for row in chosen if row["failed"]]
        lines.append(
            (
                one,
                str(len(chosen)),
                f"{np.median([row['asked'] for row in chosen]):.0f}",
                f"{1000 * np.median([row['ask_seconds'] for row in chosen]):.1f}",
                str(len(failed)),
                failed[0][:80] if failed else "",
            )
        )
    print("medians over all problems; a peer's time includes what it is told\n")
    print(ruled(lines), end="\n\n")
