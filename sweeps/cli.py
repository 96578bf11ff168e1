"""The command line: parses, calls one room, prints what it says, and turns errors into exit codes.

Every heavy import stands inside the command that needs it: `sweep --help` loads neither torch,
ray nor mlflow. What must not live here: anything that a Python caller could not do without it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from sweeps.exits import HELD, LATE, NO_SUCCESS, WRONG_INPUT

if TYPE_CHECKING:
    from sweeps.results import SweepView
    from sweeps.spec import SweepSpec

app = typer.Typer(
    name="sweep",
    help="Hyperparameter sweeps for PyTorch that survive any interruption.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
# A pipe has no width: tables are then as wide as what they hold.
out = Console(width=None if sys.stdout.isatty() else 500)
err = Console(stderr=True)

Root = Annotated[
    Path | None,
    typer.Option(
        "--root", help="Where sweeps live; default: $SWEEP_ROOT, or ./runs.", show_default=False
    ),
]
File = Annotated[Path, typer.Argument(help="The sweep's YAML file.", show_default=False)]
Name = Annotated[str, typer.Argument(help="The sweep's name.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-s",
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the spec, such as train.batch_size=32.",
        show_default=False,
    ),
]
Grace = Annotated[
    str,
    typer.Option(metavar="DURATION", help="Time to save and end after Ctrl-C: 30s, 2m, 90."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command()
def init(
    directory: Annotated[
        Path, typer.Argument(help="Where to write; created when missing.")
    ] = Path(),
) -> None:
    """Write a starter spec and a task module to edit."""
    from sweeps.starter import write_starter

    with _input_errors():
        written = write_starter(directory)
    for path in written:
        out.print(f"wrote {path}", highlight=False)
    where = "" if directory == Path() else f"cd {directory} && "
    out.print(f"run it with: {where}sweep run sweep.yaml", highlight=False)


@app.command()
def check(file: File, settings: Overrides = None) -> None:
    """Validate everything that can be known before running; start nothing."""
    from sweeps.preflight import Inspection
    from sweeps.resources import Machine, plan

    with _input_errors():
        spec = _load(file, settings)
        ways = plan(spec.resources, spec.trials, spec.concurrency, Machine.probe())
        with err.status("loading the task"):
            facts = Inspection(spec).facts()
    out.print(f"{file} is valid", style="green", highlight=False)
    for line in [*facts.lines(), ways.describe()]:
        out.print(f"  {line}", highlight=False)


@app.command()
def run(
    file: File,
    settings: Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the sweep; default: the spec's.", show_default=False),
    ] = None,
    root: Root = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(help="MLflow address; default: a store below the root.", show_default=False),
    ] = None,
    grace: Grace = "30s",
) -> None:
    """Run a sweep."""
    from sweeps.attempt import attempt
    from sweeps.durations import parse_duration
    from sweeps.layout import SweepExists, SweepPaths, resolve_root
    from sweeps.lock import SweepHeld, is_held, read_holder

    with _input_errors():
        spec = _load(file, settings, name=name, tracking_uri=tracking_uri)
        paths = SweepPaths(resolve_root(root), spec.name)
        if paths.exists():
            raise SweepExists(paths.name)
        if is_held(paths.lock):  # known before anything is loaded; taking the lock decides
            raise SweepHeld(paths.name, read_holder(paths.lock))
        seconds = parse_duration(grace, "--grace")
        raise typer.Exit(attempt(paths, spec, out, err, new=True, grace=seconds))


@app.command()
def resume(
    name: Name,
    settings: Overrides = None,
    root: Root = None,
    grace: Grace = "30s",
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Go on although the task, its code or its data changed."
        ),
    ] = False,
) -> None:
    """Continue an interrupted sweep, or extend a finished one (-s trials=40)."""
    from sweeps import display
    from sweeps.attempt import attempt
    from sweeps.durations import parse_duration
    from sweeps.lock import SweepHeld, read_holder
    from sweeps.spec import with_overrides

    with _input_errors():
        view = _view(name, root)
        if view.running:  # known before anything is loaded; taking the lock decides
            raise SweepHeld(name, read_holder(view.paths.lock))
        spec = with_overrides(view.spec, settings or [])
        if view.concluded and spec == view.spec:
            outcome = view.outcome()
            display.outcome(out, err, outcome, view.paths)
            raise typer.Exit(outcome.exit_code)
        seconds = parse_duration(grace, "--grace")
        code = attempt(
            view.paths,
            spec,
            out,
            err,
            new=False,
            grace=seconds,
            accept_changes=accept_changes,
        )
        raise typer.Exit(code)


@app.command()
def stop(
    name: Name,
    trial: Annotated[
        int | None,
        typer.Option(metavar="K", help="End this trial alone, for good.", show_default=False),
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Leave at once, as a second Ctrl-C does.")
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait for it to have happened.")
    ] = "2m",
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Stop a running sweep from another terminal: trials save their state and end."""
    from sweeps import control, display
    from sweeps.durations import parse_duration

    with _input_errors():
        if now and trial is not None:
            raise control.NothingToStop(
                "--now and --trial exclude each other; a trial ends at its next step; "
                "leave one of them out"
            )
        paths, seconds = _view(name, root).paths, parse_duration(timeout, "--timeout")
        with err.status("asking") as spinner:
            if trial is None:
                stopped = control.stop_sweep(paths, now=now, seconds=seconds, say=spinner.update)
            else:
                stopped = control.stop_trial(paths, trial, seconds=seconds, say=spinner.update)
    _show(stopped.as_dict(), as_json, lambda: display.stopped(stopped, paths))
    if not stopped.done:
        raise typer.Exit(LATE)


@app.command(name="list")
def list_command(root: Root = None, as_json: AsJson = False) -> None:
    """List the sweeps below the root."""
    from sweeps import display
    from sweeps.layout import LedgerError, list_sweeps, resolve_root
    from sweeps.results import SweepView
    from sweeps.revisions import RevisionError

    with _input_errors():
        found = []
        for paths in list_sweeps(resolve_root(root)):
            try:
                found.append(SweepView(paths).status())
            except (RevisionError, LedgerError) as error:
                display.sentence(
                    err, str(error), style="yellow"
                )  # the others are shown nevertheless
    _show(found, as_json, lambda: display.sweeps(found, resolve_root(root)))


@app.command()
def status(
    name: Name,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep looking until the sweep stops.")
    ] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show how far a sweep has come."""
    from sweeps import display

    if watch and not as_json:
        with _input_errors():
            display.watch(out, lambda: _view(name, root))
        return
    with _input_errors():
        found = _view(name, root).status()
    _show(found, as_json, lambda: display.status(found))


@app.command()
def trials(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Show a sweep's trials."""
    from sweeps import display

    with _input_errors():
        view = _view(name, root)
        found = view.trials()
    _show(found, as_json, lambda: display.trials(found, view.spec))


@app.command()
def show(
    name: Name,
    trial: Annotated[int, typer.Argument(help="The trial's number.", show_default=False)],
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show one trial: parameters, reports, end, reason and files."""
    from sweeps import display

    with _input_errors():
        view = _view(name, root)
        record = view.record(trial)
        found = {
            **view.trial(record),
            "reports": record.reports,
            "accumulation": record.accumulation,
            "traceback": record.traceback,
            "directory": str(view.paths.trial(trial)),
        }
    _show(found, as_json, lambda: display.trial(found, view.spec))


@app.command()
def best(
    name: Name,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="DIR",
            help="Write its weights and configuration there.",
            show_default=False,
        ),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show the best trial, or export it."""
    from sweeps import display
    from sweeps.results import NoBest

    with _input_errors():
        view = _view(name, root)
        try:
            found = view.best()
            written = view.export_best(export) if export is not None else []
        except NoBest as error:
            _fail(str(error), code=NO_SUCCESS)
    _show(found, as_json, lambda: display.best(found, view.spec, written))


@app.command()
def ui(
    name: Annotated[
        str | None, typer.Argument(help="Open this sweep's runs, best first.", show_default=False)
    ] = None,
    root: Root = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 5000,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Start the MLflow UI on the page of training runs, best first."""
    from sweeps import display
    from sweeps.layout import resolve_root

    with _input_errors():
        display.serve(
            err,
            resolve_root(root),
            _view(name, root) if name else None,
            port=port,
            open_browser=open_browser,
        )


@app.command()
def train(
    file: File,
    settings: Overrides = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Keep checkpoints there, and resume from them; default: keep nothing.",
            show_default=False,
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            metavar="DIR",
            help="Draw the run there: norms, learning rate, curves.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train once in this process, without Ray: for a debugger."""
    from sweeps.single import train_once

    with _input_errors():
        train_once(_load(file, settings), directory, out, figures)


@app.command()
def doctor(root: Root = None, as_json: AsJson = False) -> None:
    """Examine the machine: versions, GPUs, writable paths; clear away what dead sweeps left."""
    from sweeps import display
    from sweeps.doctor import clear_left_overs, examine, sweeps_off
    from sweeps.layout import resolve_root

    where = resolve_root(root)
    cleared = [*clear_left_overs(where), *sweeps_off(where)]
    findings = examine(where, os.environ.get("MLFLOW_TRACKING_URI"), cleared)
    _show([finding.as_dict() for finding in findings], as_json, lambda: display.findings(findings))
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """The entry point of the `sweep` command."""
    app()


def _load(
    file: Path,
    settings: list[str] | None,
    *,
    name: str | None = None,
    tracking_uri: str | None = None,
) -> SweepSpec:
    from sweeps.spec import load_spec

    return load_spec(file, settings or [], name=name, tracking_uri=tracking_uri)


def _view(name: str, root: Path | None) -> SweepView:
    from sweeps import display
    from sweeps.layout import SweepPaths, resolve_root
    from sweeps.results import SweepView

    view = SweepView(SweepPaths(resolve_root(root), name))
    if view.damage:
        display.sentence(err, view.damage, style="yellow")
    return view


def _show(found: Any, as_json: bool, render: Any) -> None:
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        out.print(render())


def _fail(message: str, *, code: int) -> NoReturn:
    from sweeps import display

    display.sentence(err, message, style="red")
    raise typer.Exit(code)


@contextmanager
def _input_errors() -> Iterator[None]:
    """What the user can put right becomes a message and exit code 2; a held sweep becomes 4."""
    from sweeps.layout import LedgerBusy, LedgerError
    from sweeps.lock import SweepHeld

    try:
        yield
    except (SweepHeld, LedgerBusy) as error:
        _fail(str(error), code=HELD)
    except (ValueError, OSError, LedgerError) as error:
        if type(error) is ValueError:
            raise  # a bare ValueError is nobody's message to the user
        _fail(str(error), code=WRONG_INPUT)
