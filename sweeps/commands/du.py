"""`sweep du`: print how much space sweeps take, by kind.

What must not live here: measuring (`results.disk_usage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from sweeps.commands.completion import sweep_names
from sweeps.commands.console import AsJson, Root, err, input_errors, show_found
from sweeps.commands.plain_console import line
from sweeps.commands.tables import TextTable


def du(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show only this sweep.",
            autocompletion=sweep_names,
        ),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show how much space sweeps take: checkpoints, logs, ledger, outbox and report."""
    from sweeps.commands import messages
    from sweeps.paths import SweepPaths, resolve_root
    from sweeps.results.disk_usage import sweep_usage, total_usage

    with input_errors(), err.status("measuring"):
        where = resolve_root(root)
        if name is not None:
            found = sweep_usage(SweepPaths(where, name))
            show_found(found, as_json, lambda: _table([found]))
            return
        everything = total_usage(
            where, lambda message: messages.sentence(err, message, style="yellow")
        )
    show_found(everything, as_json, lambda: _everything(everything))


def _everything(found: dict[str, Any]) -> RenderableType:
    """The table of all sweeps, and what else is below the root."""
    from sweeps.formatting import format_bytes

    lines = [
        f"{what}: {format_bytes(found[key])}"
        for key, what in (("tracking", "MLflow's store"), ("removed", "half-removed sweeps"))
        if found[key]
    ]
    return Group(
        *([_table(found["sweeps"])] if found["sweeps"] else []),
        *map(line, [*lines, f"total: {format_bytes(found['total'])}"]),
    )


def _table(sweeps: Sequence[dict[str, Any]]) -> RenderableType:
    from sweeps.formatting import format_bytes
    from sweeps.results.disk_usage import KINDS

    columns = [*KINDS, "total"]
    table = TextTable(["sweep", *columns], right=columns)
    for one in sweeps:
        table.rows.append([one["name"], *(format_bytes(one[column]) for column in columns)])
    return table
