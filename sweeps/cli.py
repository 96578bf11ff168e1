"""The command line: parses, calls one room, prints what it says, and turns errors into exit codes.

Every heavy import stands inside the command that needs it: `sweep --help` loads neither torch,
ray nor mlflow. What must not live here: anything that a Python caller could not do without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from sweeps import look
from sweeps.console import (
    HELD,
    WRONG_INPUT,
    AsJson,
    File,
    Name,
    Offline,
    Overrides,
    Root,
    err,
    input_errors,
    out,
    say_cause,
    show_found,
    view_of,
    warn,
)

if TYPE_CHECKING:
    from sweeps.layout import SweepPaths
    from sweeps.results import Outcome
    from sweeps.spec import SweepSpec

app = typer.Typer(
    name="sweep",
    help="Hyperparameter sweeps for PyTorch that survive any interruption.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command()
def init(
    directory: Annotated[
        Path, typer.Argument(help="Where to write; created when missing.")
    ] = Path(),
) -> None:
    """Write a starter spec and a task module to edit."""
    from sweeps.starter import write_starter

    with input_errors():
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

    with input_errors():
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
    grace: Annotated[
        float, typer.Option(help="Seconds for trials to checkpoint after Ctrl-C.")
    ] = 30.0,
    offline: Offline = False,
) -> None:
    """Run a sweep."""
    from sweeps.layout import SweepExists, SweepPaths, resolve_root
    from sweeps.lock import SweepHeld, is_held, read_holder

    with input_errors():
        spec = _load(file, settings, name=name, tracking_uri=tracking_uri)
        paths = SweepPaths(resolve_root(root), spec.name)
        if is_held(paths.lock):  # known before anything is loaded; taking the lock decides
            raise SweepHeld(paths.name, read_holder(paths.lock))
        if paths.exists():
            raise SweepExists(paths.name)
        _run(paths, spec, new=True, grace=grace, offline=offline)


@app.command()
def resume(
    name: Name,
    settings: Overrides = None,
    root: Root = None,
    grace: Annotated[
        float, typer.Option(help="Seconds for trials to checkpoint after Ctrl-C.")
    ] = 30.0,
    offline: Offline = False,
) -> None:
    """Continue an interrupted sweep, or extend a finished one (-s trials=40)."""
    from sweeps.lock import SweepHeld, read_holder
    from sweeps.spec import with_overrides

    with input_errors():
        view = view_of(name, root)
        if view.running:  # known before anything is loaded; taking the lock decides
            raise SweepHeld(name, read_holder(view.paths.lock))
        spec = with_overrides(view.spec, settings or [])
        if view.concluded and spec == view.spec:
            _end(view.outcome(), view.paths)
        _run(view.paths, spec, new=False, grace=grace, offline=offline)


app.command(name="list")(look.list_command)
app.command()(look.status)
app.command()(look.trials)
app.command()(look.show)
app.command()(look.best)
app.command()(look.compare)
app.command()(look.report)


@app.command()
def sync(name: Name, root: Root = None) -> None:
    """Deliver what the outbox still holds to the tracking server."""
    from sweeps.sync import deliver

    with input_errors():
        view = view_of(name, root)
        with err.status("delivering to the tracking store"):
            delivered, left = deliver(view)
    out.print(f"delivered {delivered} records; {left} wait", highlight=False)
    if left:
        raise typer.Exit(1)


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

    with input_errors():
        display.serve(
            err,
            resolve_root(root),
            view_of(name, root) if name else None,
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

    with input_errors():
        train_once(_load(file, settings), directory, out, figures)


@app.command()
def doctor(root: Root = None, as_json: AsJson = False) -> None:
    """Examine the machine: versions, GPUs, writable paths, left-overs of dead drivers."""
    from sweeps import display
    from sweeps.doctor import examine, left_overs
    from sweeps.layout import resolve_root

    where = resolve_root(root)
    findings = examine(where, os.environ.get("MLFLOW_TRACKING_URI"), left_overs(where))
    show_found(
        [finding.as_dict() for finding in findings], as_json, lambda: display.findings(findings)
    )
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


def _run(
    paths: SweepPaths, spec: SweepSpec, *, new: bool, grace: float, offline: bool
) -> NoReturn:
    """Check, run, say how it ended and what comes next."""
    from sweeps import display
    from sweeps.layout import LedgerBusy, LedgerError
    from sweeps.lock import LockLost
    from sweeps.preflight import Inspection
    from sweeps.resources import Machine, plan

    machine = Machine.probe()
    ways = plan(spec.resources, spec.trials, spec.concurrency, machine)
    with err.status("loading the task") as spinner:
        inspection = Inspection(spec)

        from sweeps.live import LiveTable, PlainLines
        from sweeps.run import run_sweep  # imports Ray while the child imports torch

        inspection.facts()
        if new and spec.tracking.uri is not None and not offline:
            from tracking.probe import probe

            spinner.update("asking the tracking server")
            probe(spec.tracking.uri)

        def make_view(finished: int) -> LiveTable | PlainLines:
            spinner.stop()
            return (LiveTable if out.is_terminal else PlainLines)(out, spec, finished=finished)

        def say(what: str) -> None:
            spinner.update(what)
            spinner.start()

        try:
            outcome: Outcome = run_sweep(
                paths,
                spec,
                ways,
                machine,
                make_view,
                new=new,
                grace=grace,
                offline=offline,
                say=say,
                warn=warn,
            )
        except (LedgerError, LockLost, OSError) as error:
            spinner.stop()
            say_cause(str(error))
            if paths.exists():
                display.resume(err, paths)
            by_another = isinstance(error, LedgerBusy | LockLost)
            raise typer.Exit(HELD if by_another else WRONG_INPUT) from None
    _end(outcome, paths)


def _end(outcome: Outcome, paths: SweepPaths) -> NoReturn:
    """Say how a sweep ended and what comes next, and leave with its exit code."""
    from sweeps import display

    display.outcome(out, err, outcome, paths)
    raise typer.Exit(outcome.exit_code)
