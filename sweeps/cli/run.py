"""The commands that start and end sweeps: init, clone, run, resume and stop.

What must not live here: running it (`run.launch`), and what is printed (`run_console`).
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from sweeps.cli.console import (
    AsJson,
    File,
    Name,
    Offline,
    Overrides,
    Root,
    err,
    input_errors,
    naming_directory_of,
    out,
    read_numbers,
    read_path,
    show_found,
    trial_numbers,
    trial_option,
    view_of,
)
from sweeps.errors import LATE
from sweeps.paths import PROGRAM, program_name

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
        from sweeps.formatting import parse_duration
        from sweeps.paths import SweepPaths, resolve_root
        from sweeps.spec.spec import load_with_positions

        loaded = load_with_positions(file, settings or [], name=name, tracking_uri=tracking_uri)
        paths = SweepPaths(resolve_root(root), loaded[0].name)
        seconds = parse_duration(grace, "--grace")

        from sweeps.cli import messages
        from sweeps.cli.run_console import RunConsole, run_to_end  # slow: after the errors
        from sweeps.run.launch import start
        from sweeps.run.prepared import RunOptions

        messages.choices(err, loaded[1])
        display = RunConsole(spinner)
        options = RunOptions(grace=seconds, address=address, offline=offline)
        raise typer.Exit(
            run_to_end(lambda: start(paths, file, loaded, display, options), paths, spinner)
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
        from sweeps.formatting import parse_duration

        view, numbers = view_of(name, root), read_numbers("--finish", finish or ())
        seconds = parse_duration(grace, "--grace")

        from sweeps.cli.run_console import RunConsole, run_to_end  # slow: after the errors
        from sweeps.reconcile.finishing import FinishPruned
        from sweeps.run import launch as operation
        from sweeps.run.prepared import RunOptions

        options = RunOptions(
            grace=seconds,
            address=address,
            accept_changes=accept_changes,
            offline=offline,
            extra=FinishPruned(numbers),
        )
        raise typer.Exit(
            run_to_end(
                lambda: operation.resume(view, settings or [], RunConsole(spinner), options),
                view.paths,
                spinner,
            )
        )


def init(
    directory: Annotated[
        Path,
        typer.Argument(
            parser=read_path, metavar="DIR", help="Where to write; created when missing."
        ),
    ] = Path(),
) -> None:
    """Write a starter spec and a task module to edit."""
    from sweeps.run.starter import write_starter

    with input_errors():
        written = write_starter(directory)
    for path in written:
        out.print(f"wrote {path}")
    where, program = "", program_name()
    if directory != Path():
        where = f"cd {shlex.quote(str(directory))} && "
        if program != PROGRAM:
            program = os.path.relpath(program, directory)
    run = shlex.join((program, "run", "sweep.yaml"))
    out.print(f"run it with: {where}{run}", soft_wrap=True)


def clone(
    name: Name,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new sweep's name.")],
    settings: Overrides = None,
    root: Root = None,
) -> None:
    """Write NEW.yaml, the spec of a new sweep with the configuration of another one."""
    from sweeps.cli import messages
    from sweeps.paths import SweepPaths, command_line, resolve_root
    from sweeps.run.starter import write_clone

    with input_errors():
        paths = SweepPaths(resolve_root(root), name)
        written, changed, damage = write_clone(paths, new, settings or [])
    if damage:
        messages.sentence(err, damage, style="yellow")
    out.print(f"wrote {written}; changed: {changed}", soft_wrap=True)
    run = command_line(paths.root, "run", str(written))
    out.print(f"run it with: {run}", soft_wrap=True)


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
    from sweeps.cli import messages
    from sweeps.formatting import parse_duration
    from sweeps.run import stop_requests as operation

    with input_errors():
        view, seconds = view_of(name, root), parse_duration(timeout, "--timeout")
        with err.status("requesting the stop") as spinner:
            stopped = operation.stop(
                view, trial=trial, now=now, seconds=seconds, say=spinner.update
            )
    show_found(stopped.as_dict(), as_json, lambda: messages.stopped(stopped, view.paths))
    if not stopped.done:
        raise typer.Exit(LATE)
