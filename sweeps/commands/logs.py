"""`sweep logs`: print what a trial printed, and follow it while it trains.

What must not live here: reading the log (`results.trial_output`).
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sweeps.commands.console import Name, Root, TrialNumber, err, input_errors, view_of


def logs(
    name: Name,
    trial: TrialNumber,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print new lines until the trial ends, or Ctrl-C."),
    ] = False,
    root: Root = None,
) -> None:
    """Print the output of a trial: its own prints, warnings, and how its process ended."""
    from sweeps.results.trial_output import trial_output

    with input_errors():
        view = view_of(name, root)
        is_empty = True
        for text in trial_output(view, trial, follow=follow):
            sys.stdout.write(text)
            sys.stdout.flush()
            is_empty = is_empty and not text
    if is_empty:
        show = view.paths.command("show", str(trial))
        err.print(f"trial {trial} has printed nothing; see: {show}", soft_wrap=True)
