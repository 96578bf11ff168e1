"""`sweep run` and `sweep resume`: run a sweep, and print how it ended.

What must not live here: running it (`operations.run`), and what is printed (`run_console`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from sweeps.commands.completion import trial_numbers
from sweeps.commands.console import (
    File,
    Name,
    Offline,
    Overrides,
    Root,
    err,
    input_errors,
    naming_directory_of,
    read_numbers,
    view_of,
)

Finish = Annotated[
    list[str] | None,
    typer.Option(
        "--finish",
        metavar="K",
        help="Train pruned trial K to its end, exempt from early stopping; also 4,7; repeatable.",
        autocompletion=trial_numbers,
    ),
]
Grace = Annotated[
    str,
    typer.Option(
        metavar="DURATION", help="Time for trials to save after Ctrl-C, such as 30s or 2m."
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Run trials on this Ray cluster instead of this machine; default: $RAY_ADDRESS.",
    ),
]


def run(
    file: File,
    settings: Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The sweep's name; default: the spec's."),
    ] = None,
    root: Root = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="MLflow tracking URI; default: the spec's, or a store below the root.",
        ),
    ] = None,
    grace: Grace = "30s",
    offline: Offline = False,
    address: Address = None,
) -> None:
    """Run a new sweep."""
    with err.status("reading the spec") as spinner, naming_directory_of(file), input_errors():
        from sweeps.config.durations import parse_duration
        from sweeps.config.spec import load_with_positions
        from sweeps.paths import SweepPaths, resolve_root

        loaded = load_with_positions(file, settings or [], name=name, tracking_uri=tracking_uri)
        paths = SweepPaths(resolve_root(root), loaded[0].name)
        seconds = parse_duration(grace, "--grace")

        from sweeps.commands import messages
        from sweeps.commands.run_console import RunConsole, run_to_end  # slow: after the errors
        from sweeps.operations.run import start

        messages.choices(err, loaded[1])
        display = RunConsole(spinner)
        raise typer.Exit(
            run_to_end(
                lambda: start(
                    paths, file, loaded, display, grace=seconds, address=address, offline=offline
                ),
                paths,
                spinner,
            )
        )


def resume(
    name: Name,
    settings: Overrides = None,
    finish: Finish = None,
    root: Root = None,
    grace: Grace = "30s",
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Resume although the task, its code or its data has changed."
        ),
    ] = False,
    offline: Offline = False,
    address: Address = None,
) -> None:
    """Resume an interrupted sweep, extend a finished one (-s trials=40), or finish a trial."""
    with err.status("reading the sweep") as spinner, input_errors():
        from sweeps.config.durations import parse_duration

        view, numbers = view_of(name, root), read_numbers("--finish", finish or ())
        seconds = parse_duration(grace, "--grace")

        from sweeps.commands.run_console import RunConsole, run_to_end  # slow: after the errors
        from sweeps.operations import run as operation

        raise typer.Exit(
            run_to_end(
                lambda: operation.resume(
                    view,
                    settings or [],
                    RunConsole(spinner),
                    grace=seconds,
                    address=address,
                    accept_changes=accept_changes,
                    finish=numbers,
                    offline=offline,
                ),
                view.paths,
                spinner,
            )
        )
