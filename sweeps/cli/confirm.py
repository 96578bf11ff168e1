"""`sweep confirm`, which trains the best trials again.

What must not live here: running them (`run`), and the words of the result (`trust.confirm`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from sweeps.cli.console import (
    AsJson,
    Name,
    Offline,
    Root,
    err,
    input_errors,
    out,
    read_whole,
    show_found,
    view_of,
)
from sweeps.cli.plain_console import line, plain_table
from sweeps.cli.run import Address, Grace
from sweeps.errors import NO_SUCCESS
from sweeps.formatting import parse_duration, quoted

if TYPE_CHECKING:
    from sweeps.paths import SweepPaths
    from sweeps.trust.confirm import ConfirmationResult


def _read_probability(text: object) -> float:
    """Parse a number; `trust.confirm` checks its range."""
    try:
        return float(str(text))
    except ValueError:
        raise typer.BadParameter(
            f"{quoted(str(text))} is not valid; it must be a probability from 0.5 to below 1; "
            "write for example 0.95"
        ) from None


def confirm(
    name: Name = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            parser=read_whole(0),
            metavar="K",
            help="How many of the best trials; default: as the last time, or 5.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds",
            parser=read_whole(0),
            metavar="N",
            help="Under how many seeds at most; default: as the last time, or 5.",
        ),
    ] = None,
    until: Annotated[
        float | None,
        typer.Option(
            "--until",
            parser=_read_probability,
            metavar="P",
            help="End when a trial is the best with this probability; default: as the last "
            "time, or 0.95.",
        ),
    ] = None,
    root: Root = None,
    grace: Grace = "30s",
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Confirm although the task, its code or its data has changed."
        ),
    ] = False,
    offline: Offline = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Train the best trials again until it is known which is the best."""
    with err.status("reading the sweep") as spinner, input_errors():
        from sweeps.trust.confirm import find_confirmation
        from sweeps.view.sweep_view import SweepView

        view = view_of(name, root)
        grace_seconds = parse_duration(grace, "--grace")

        from sweeps.cli.run_console import RunConsole, run_to_end  # slow: after the errors
        from sweeps.run.prepared import RunOptions
        from sweeps.trust.confirm import ConfirmLeaders
        from sweeps.trust.confirm import confirm as operation

        display = RunConsole(spinner, console=err if as_json else out)
        code = run_to_end(
            lambda: operation(
                view,
                display,
                ConfirmLeaders(top=top, seeds=seeds, until=until),
                RunOptions(
                    grace=grace_seconds,
                    address=address,
                    accept_changes=accept_changes,
                    offline=offline,
                ),
            ),
            view.paths,
            spinner,
            command="confirm",
        )
        if code:
            raise typer.Exit(code)
        found = find_confirmation(SweepView(view.paths))
        assert found is not None
        show_found(found.as_dict(), as_json, lambda: shown(found, view.paths))
        if found.first is None:
            raise typer.Exit(NO_SUCCESS)


def shown(found: ConfirmationResult, paths: SweepPaths) -> RenderableType:
    """Return the table of the leaders, what was found, and the command that shows the winner."""
    columns = ("trial", "P(best)", "mean", "95 %", "seeds", "search saw", "time a run")
    table = plain_table(*columns, "", right=columns)
    for one in found.leaders:
        cells = one.cells()
        table.add_row(
            *(cells[column] for column in columns),
            "" if one.standing == "behind" else one.standing,
            style="bold" if one.standing == "first" else "",
        )
    lines: list[RenderableType] = [table, *map(Text, found.sentences())]
    if found.first is not None:
        lines.append(line(f"show it: {paths.command('best', '--confirmed')}"))
    elif not found.has_ended or found.failed_leaders:
        lines.append(line(f"continue with: {paths.command('confirm')}"))
    return Group(*lines)
