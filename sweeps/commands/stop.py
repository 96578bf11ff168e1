"""`sweep stop`: stop a running sweep, or end one trial.

What must not live here: how they are stopped (`operations.stop`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from sweeps.commands.console import (
    AsJson,
    Name,
    Root,
    err,
    input_errors,
    show_found,
    trial_option,
    view_of,
)
from sweeps.exit_codes import LATE


def stop(
    name: Name,
    trial: Annotated[
        int | None,
        trial_option("End only this trial, which never resumes; the sweep need not run."),
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Exit immediately, as a second Ctrl-C does.")
    ] = False,
    timeout: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How long to wait until the sweep or trial ends."),
    ] = "2m",
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Stop a running sweep, whose trials save and can resume; or end one trial."""
    from sweeps.commands import messages
    from sweeps.config.durations import parse_duration
    from sweeps.operations import stop as operation

    with input_errors():
        view, seconds = view_of(name, root), parse_duration(timeout, "--timeout")
        with err.status("requesting the stop") as spinner:
            stopped = operation.stop(
                view, trial=trial, now=now, seconds=seconds, say=spinner.update
            )
    show_found(stopped.as_dict(), as_json, lambda: messages.stopped(stopped, view.paths))
    if not stopped.done:
        raise typer.Exit(LATE)
