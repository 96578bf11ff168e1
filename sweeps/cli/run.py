"""The commands that start and end sweeps: init, run, resume and stop.

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
    at_most_one,
    err,
    input_errors,
    naming_directory_of,
    only_with,
    out,
    paths_of,
    read_path,
    read_whole,
    show_found,
    sweep_names,
    trial_argument,
    trial_numbers,
    view_and_trials,
)
from sweeps.errors import LATE
from sweeps.paths import PROGRAM, program_name

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
    name: Name = None,
    trials: Annotated[
        list[int] | None, trial_argument("With --retry or --finish: these trials.")
    ] = None,
    settings: Overrides = None,
    retry: Annotated[
        bool,
        typer.Option(
            "--retry", help="Run failed trials again after a fix, all of them or the given ones."
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="With --retry, start at step 0, not at newest checkpoints."),
    ] = False,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish",
            help="Train pruned trials to their end, or complete ones to a longer budget.",
        ),
    ] = False,
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
    """Continue a sweep, extend it, or run its failed trials again."""
    at_most_one({"--retry": retry, "--finish": finish})
    only_with("--retry", retry, {"--fresh": fresh})
    with err.status("reading the sweep") as spinner, input_errors():
        from sweeps.formatting import parse_duration

        view, numbers = view_and_trials(name, trials or (), root)
        only_with("--retry or --finish", retry or finish, {"TRIAL": numbers})
        only_with("TRIAL", numbers, {"--finish": finish})
        seconds = parse_duration(grace, "--grace")

        from sweeps.cli.run_console import RunConsole, run_to_end  # slow: after the errors
        from sweeps.reconcile.finishing import FinishTrials
        from sweeps.reconcile.retrying import RetryRequest
        from sweeps.run import launch as operation
        from sweeps.run.prepared import RunOptions

        options = RunOptions(
            grace=seconds,
            address=address,
            accept_changes=accept_changes,
            offline=offline,
            extra=RetryRequest(tuple(numbers), fresh) if retry else FinishTrials(numbers),
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
            parser=read_path,
            metavar="DIR",
            help="Where to write, created when missing; with --from, the new sweep's name, "
            "by default NAME-2.",
        ),
    ] = Path(),
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="Write instead the spec of a new sweep, configured as this one.",
            autocompletion=sweep_names,
        ),
    ] = None,
    settings: Overrides = None,
    root: Root = None,
) -> None:
    """Write a starter spec and a task, or the spec of an earlier sweep."""
    from sweeps.cli import messages
    from sweeps.paths import command_line
    from sweeps.run.starter import write_clone, write_starter

    only_with("--from", source, {"-s": settings})
    with input_errors():
        if source is not None:
            paths = paths_of(source, root)
            new = f"{source}-2" if directory == Path() else str(directory)
            written, changed, damage = write_clone(paths, new, settings or [])
            if damage:
                messages.sentence(err, damage, style="yellow")
            out.print(f"wrote {written}; changed: {changed}", soft_wrap=True)
            run = command_line(paths.root, "run", str(written))
        else:
            for path in write_starter(directory):
                out.print(f"wrote {path}")
            where, program = "", program_name()
            if directory != Path():
                where = f"cd {shlex.quote(str(directory))} && "
                if program != PROGRAM:
                    program = os.path.relpath(program, directory)
            run = where + shlex.join((program, "run", "sweep.yaml"))
    out.print(f"run it with: {run}", soft_wrap=True)


def stop(
    name: Name = None,
    trial: Annotated[
        int | None,
        trial_argument("End only this trial, which never resumes; the sweep need not run."),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--trial",
            parser=read_whole(0),
            metavar="TRIAL",
            help="The same as TRIAL.",
            autocompletion=trial_numbers,
        ),
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
    """Stop a sweep, whose trials save and can resume; or end one trial."""
    from sweeps.cli import messages
    from sweeps.formatting import parse_duration
    from sweeps.run import stop_requests as operation

    with input_errors():
        view, numbers = view_and_trials(name, [trial], root)
        at_most_one({"TRIAL": numbers, "--trial": number})
        seconds = parse_duration(timeout, "--timeout")
        with err.status("requesting the stop") as spinner:
            stopped = operation.stop(
                view,
                trial=next(iter(numbers), number),
                now=now,
                seconds=seconds,
                say=spinner.update,
            )
    show_found(stopped.as_dict(), as_json, lambda: messages.stopped(stopped, view.paths))
    if not stopped.done:
        raise typer.Exit(LATE)
