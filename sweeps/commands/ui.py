"""`sweep ui`: start MLflow's server unless one runs, and open the page of a sweep's runs.

What must not live here: serving the page (`operations.ui`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from sweeps.commands.completion import sweep_names
from sweeps.commands.console import Root, err, fail, input_errors, read_whole, view_of
from sweeps.exit_codes import LATE


def ui(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show only this sweep's runs.",
            autocompletion=sweep_names,
        ),
    ] = None,
    root: Root = None,
    port: Annotated[
        int,
        typer.Option(
            parser=read_whole(0, 65535),
            metavar="PORT",
            help="Port on 127.0.0.1; 0: any free port.",
        ),
    ] = 5000,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Start the MLflow UI and open the page of training runs, best first."""
    from sweeps.operations.ui import serve
    from sweeps.paths import resolve_root
    from tracking.ui import ServerError

    def say(message: str) -> None:
        err.print(message, soft_wrap=True)

    try:
        with input_errors():
            serve(
                say,
                resolve_root(root),
                view_of(name, root) if name is not None else None,
                port=port,
                open_browser=open_browser,
                doing=err.status,
            )
    except ServerError as error:
        fail(str(error), code=LATE)
