"""The table of a running sweep's trials, as large as the terminal and no larger.

What must not live here: following a sweep (`results.sweep_progress`), and the table of
`sweep trials` (`render`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sweeps.config.spec import SweepSpec
from sweeps.formatting import format_duration, format_number, format_parameter, titles
from sweeps.results.sweep_progress import TrialRow, best_name, best_of, in_order

STATE_STYLES = {
    "running": "cyan",
    "complete": "green",
    "pruned": "dim",
    "failed": "red",
    "interrupted": "yellow",
}
_GAP = 2
_NUMBER_WIDTH = 9
"""The usual width of a number; narrower columns would jump when values change."""
_MIN_ROWS = 2


class _Column(NamedTuple):
    title: str
    cells: list[str]
    what: str = ""
    """What is counted as `1 more ...` if the column does not fit; empty: it is always shown."""

    @property
    def width(self) -> int:
        least = _NUMBER_WIDTH if self.what else 0
        return _GAP + max(least, cell_len(self.title), *map(cell_len, self.cells), 0)


def trial_table(
    rows: Sequence[TrialRow],
    spec: SweepSpec,
    durations: Mapping[int, float | None],
    *,
    width: int,
    height: int,
    live: bool,
) -> list[RenderableType]:
    """Return the table of the trials and columns that fit, and a line that counts the others.

    Args:
        rows: All trials that have started.
        spec: The sweep.
        durations: For how long workers have trained each trial.
        width: The columns of the terminal.
        height: The lines that the table and the line below it may take.
        live: Whether the rows have the last values, beside the best one.
    """
    best = best_of(rows, spec)
    shown = _fitting(in_order(rows, best), best, height)
    columns, hidden = _columns(shown, spec, durations, live=live, width=width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        left = column.title in ("trial", "state")
        table.add_column(
            column.title,
            justify="left" if left else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for index, row in enumerate(shown):
        cells = [Text(column.cells[index]) for column in columns]
        cells[1].stylize(STATE_STYLES.get(row.state, ""))
        table.add_row(*cells, style="bold" if row is best else "")
    more = {"trial": len(rows) - len(shown), **hidden}
    said = ", ".join(f"{n} more {what}{'s' * (n > 1)}" for what, n in more.items() if n)
    return [table, Text(f"+ {said}", style="dim")] if said else [table]


def _fitting(rows: list[TrialRow], best: TrialRow | None, height: int) -> list[TrialRow]:
    """Return the first rows that fit below a header and above a line; the best one is kept."""
    room = max(height - 2, _MIN_ROWS)
    if len(rows) <= room:
        return rows
    if best is None or best in rows[:room]:
        return rows[:room]
    return [*rows[: room - 1], best]


def _columns(
    rows: Sequence[TrialRow],
    spec: SweepSpec,
    durations: Mapping[int, float | None],
    *,
    live: bool,
    width: int,
) -> tuple[list[_Column], dict[str, int]]:
    """Return the columns that fit, and how many parameters and other columns do not."""

    def numbers(title: str, name: str, what: str = "") -> _Column:
        return _Column(title, [format_number(row.metrics.get(name)) for row in rows], what)

    first = [
        _Column("trial", [str(row.number) for row in rows]),
        _Column("state", [row.state for row in rows]),
        _Column(spec.budget.report_word, [f"{row.epoch}/{spec.budget.reports}" for row in rows]),
    ]
    metrics = [
        numbers(metric, metric, "column" * (index > 0))
        for index, metric in enumerate(spec.metrics)
    ]
    best = [numbers("best", best_name(spec))] if live else []
    rates = [] if not live else ["train/grad_norm"]
    if live and "train.optimizer.lr" not in spec.space:  # else the applied rate says little
        rates.insert(0, "train/lr")
    last = [numbers(name.removeprefix("train/"), name, "column") for name in rates]
    time = [_Column("time", [format_duration(durations[row.number]) for row in rows])]
    beside = [column.title for column in (*first, *metrics, *best, *last, *time)]
    params = [
        _Column(title, [format_parameter(row.params, key) for row in rows], "parameter")
        for key, title in zip(spec.space, titles(list(spec.space), beside), strict=True)
    ]
    # In the order in which they get their place.
    wanted = [*first, *metrics[:1], *best, *time, *params, *metrics[1:], *last]
    kept, hidden, used = [], {"parameter": 0, "column": 0}, -_GAP
    for column in wanted:
        if not column.what or used + column.width <= width:
            kept.append(id(column))
            used += column.width
        else:
            hidden[column.what] += 1
    columns = [*first, *metrics, *best, *params, *last, *time]
    return [column for column in columns if id(column) in kept], hidden
