"""`sweep sync`: deliver what waits, and print what was delivered.

What must not live here: the delivery (`operations.sync`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from sweeps.commands.console import AsJson, Name, Root, err, input_errors, show_found, view_of
from sweeps.exit_codes import LATE


def sync(
    name: Name,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Compare the whole tracking store with the trials' own files."
        ),
    ] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Deliver waiting records and notifications, and draw missing figures."""
    from sweeps.commands import messages, render
    from sweeps.operations.sync import deliver

    with input_errors():
        view = view_of(name, root)
        with err.status("delivering to the tracking store"):
            done = deliver(view, verify=verify)
    show_found(done.as_dict(), as_json, lambda: messages.synced(done, view.paths, verified=verify))
    if done.held:
        messages.sentence(err, done.held, style="yellow")
    if done.refused:
        messages.sentence(err, render.refused(done.refused), style="yellow")
    if done.left or (verify and done.still_missing):
        raise typer.Exit(LATE)
