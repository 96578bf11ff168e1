"""Show the values of a sweep with several metrics, and the trials of its Pareto front.

What must not live here: the computation of the front (`ledger.ranking`), and output that does not
depend on the number of metrics (`render`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from sweeps.cli.plain_console import line, plain_table
from sweeps.formatting import format_best, format_cells, format_parameter, joined, titles
from sweeps.paths import SweepPaths

if TYPE_CHECKING:
    from sweeps.spec.spec import SweepSpec
    from sweeps.view.outcome import SweepOutcome


def front_lines(
    front: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> list[RenderableType]:
    """Return the front for `sweep status`, two lines for each trial."""
    if not front:
        return []
    found: list[RenderableType] = [Text(_front_head(len(front)))]
    for one in front:
        found.append(Text(f"  trial {one['number']}: {format_best(metrics, one['value'])}"))
        found.append(Text("      " + joined(one["params"])))
    return found


def front_table(
    front: Sequence[dict[str, Any]], spec: SweepSpec, paths: SweepPaths, lost: str | None = None
) -> RenderableType:
    """Return the table of `sweep best` without `--trial`.

    Args:
        front: The trials of the front.
        spec: The sweep.
        paths: Its paths.
        lost: Why none of them has weights; None if one has.
    """
    first = ("trial", *spec.metrics, spec.budget.report_word)
    columns = (*first, *titles(list(spec.space), first))
    found = plain_table(*columns, right=columns[1:])
    for one in front:
        found.add_row(
            str(one["number"]),
            *format_cells(one["value"], spec.metrics),
            str(one["epoch"]),
            *(format_parameter(one["params"], key) for key in spec.space),
        )
    choose = paths.command("best", "--trial", "K", "--export", "DIR")
    last = f"no weights to export: {lost}" if lost else f"export one of them: {choose}"
    return Group(Text(_front_head(len(front)), style="bold"), found, line(last))


def front_outcome(out: Console, result: SweepOutcome) -> None:
    """Print the front at the end of a sweep."""
    if result.best:
        out.print(_front_head(len(result.best)), style="bold", soft_wrap=True)
    for one in result.best:
        trial = f"  trial {one.number}: {format_best(result.metrics, one.values)}"
        out.print(f"{trial} ({joined(one.best_params)})", soft_wrap=True)


def _front_head(count: int) -> str:
    if count == 1:
        return "best: one trial, which no other beats in any metric"
    return (
        f"best: {count} trials on the Pareto front: none is better than another one in a metric "
        "without being worse in one"
    )
