"""`sweep retry`: run failed trials again, and continue the sweep.

What must not live here: choosing and reopening trials (`reconciliation.retrying`), and running
them (`operations.run`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from sweeps.commands.completion import trial_numbers
from sweeps.commands.console import (
    Name,
    Offline,
    Overrides,
    Root,
    err,
    fail,
    input_errors,
    read_numbers,
    view_of,
)
from sweeps.commands.run import Address, Grace
from sweeps.exit_codes import WRONG_INPUT


def retry(
    name: Name,
    settings: Overrides = None,
    failed: Annotated[
        bool,
        typer.Option(
            "--failed", help="Run every failed trial again; the default without --trial."
        ),
    ] = False,
    trial: Annotated[
        list[str] | None,
        typer.Option(
            "--trial",
            metavar="K",
            help="Run failed trial K again; also 4,7; repeatable.",
            autocompletion=trial_numbers,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start at step 0, not at the newest checkpoints.")
    ] = False,
    root: Root = None,
    grace: Grace = "30s",
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Continue although other trials were trained with other code or data.",
        ),
    ] = False,
    offline: Offline = False,
    address: Address = None,
) -> None:
    """Run failed trials again after a fix, with the same numbers, and continue the sweep."""
    if failed and trial:
        fail(
            "--failed and --trial exclude each other; --failed takes all failed trials; leave one "
            "of them out",
            code=WRONG_INPUT,
        )
    with err.status("reading the sweep") as spinner, input_errors():
        from sweeps.config.durations import parse_duration

        numbers, view = read_numbers("--trial", trial or ()), view_of(name, root)
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
                    retry=operation.RetryRequest(tuple(numbers), fresh),
                    offline=offline,
                ),
                view.paths,
                spinner,
            )
        )
