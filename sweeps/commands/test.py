"""The options of `sweep test`.

What must not live here: the evaluation and its record (`evaluation`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from sweeps.commands.completion import trial_numbers
from sweeps.commands.console import (
    AsJson,
    Name,
    Offline,
    Root,
    err,
    fail,
    input_errors,
    read_whole,
    show_found,
    view_of,
)
from sweeps.exit_codes import NO_SUCCESS


def evaluate(
    name: Name,
    trial: Annotated[
        int | None,
        typer.Option(
            parser=read_whole(0),
            metavar="K",
            help="Test this trial instead of the best.",
            show_default=False,
            autocompletion=trial_numbers,
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Evaluate also if the trial was tested before.")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Evaluate although the task's model or data have changed since.",
        ),
    ] = False,
    offline: Offline = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the best trial on test data that no trial has used, and record the values."""
    with err.status("reading the sweep"), input_errors():
        from sweeps.commands.evaluation import evaluate_trial, shown, warn
        from sweeps.results.sweep_status import NoBest

        view = view_of(name, root)
    with input_errors():
        try:
            done = evaluate_trial(
                view,
                trial,
                again=again,
                accept_changes=accept_changes,
                offline=offline,
                err=err,
            )
        except NoBest as error:
            fail(str(error), code=NO_SUCCESS)
    show_found(done.as_dict(), as_json, lambda: shown(done, view))
    warn(done, err)
