"""The command line: parses arguments, calls one module, prints its result and sets the exit code.

Heavy imports are inside the commands that need them, so that `sweep --help` loads neither torch,
ray nor mlflow. What must not live here: anything that a Python caller could not do without it.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sweeps.commands import inspect
from sweeps.commands.broken_pipe import ignore_broken_pipes
from sweeps.commands.clone import clone
from sweeps.commands.completion import sweep_names, trial_numbers
from sweeps.commands.console import (
    Address,
    AsJson,
    Commands,
    File,
    Finish,
    Grace,
    Name,
    Offline,
    Overrides,
    Root,
    err,
    fail,
    input_errors,
    out,
    read_numbers,
    read_path,
    read_whole,
    show_found,
    view_of,
)
from sweeps.commands.du import du
from sweeps.commands.export import export
from sweeps.commands.logs import logs
from sweeps.commands.rm import rm
from sweeps.commands.test import evaluate
from sweeps.commands.trust import trust
from sweeps.exit_codes import LATE, WRONG_INPUT

if TYPE_CHECKING:
    from sweeps.config.spec import SweepSpec

app = typer.Typer(
    name="sweep",
    cls=Commands,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Hyperparameter sweeps for PyTorch that survive any interruption.",
    epilog="Example: sweep init && sweep run sweep.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        out.print(f"gradsweep {version('gradsweep')}")
        raise typer.Exit


@app.callback()
def read_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Read the options that stand before any command."""


@app.command(epilog="Example: sweep init my_project")
def init(
    directory: Annotated[
        Path,
        typer.Argument(
            parser=read_path, metavar="DIR", help="Where to write; created when missing."
        ),
    ] = Path(),
) -> None:
    """Write a starter spec and a task module to edit."""
    from sweeps.commands.init import write_starter

    with input_errors():
        written = write_starter(directory)
    for path in written:
        out.print(f"wrote {path}")
    where = "" if directory == Path() else f"cd {shlex.quote(str(directory))} && "
    out.print(f"run it with: {where}sweep run sweep.yaml", soft_wrap=True)


@app.command(epilog="Example: sweep check sweep.yaml --thorough")
def check(
    file: File,
    settings: Overrides = None,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough", help="Check the task's whole contract; builds the task several times."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Validate a spec and its task, and show what the sweep would take; starts nothing."""
    from sweeps.commands import messages
    from sweeps.commands.check import check_sweep

    with _loaded(file, settings) as spec:
        for module in spec.modules:  # warn before the import
            notes = err if as_json else out
            messages.sentence(notes, f"imports {module}, whose code runs", style="")
        checked = check_sweep(file, spec, err, thorough=thorough)
    show_found(checked.as_dict(), as_json, checked.rendered)


@app.command(epilog="Example: sweep run sweep.yaml -s trials=40 --name wider")
def run(
    file: File,
    settings: Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The sweep's name; default: the spec's.", show_default=False
        ),
    ] = None,
    root: Root = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="MLflow tracking URI; default: the spec's, or a store below the root.",
            show_default=False,
        ),
    ] = None,
    grace: Grace = "30s",
    offline: Offline = False,
    address: Address = None,
) -> None:
    """Run a new sweep."""
    with (
        err.status("reading the spec") as spinner,
        _loaded(file, settings, name=name, tracking_uri=tracking_uri, to_run=True) as spec,
    ):
        from sweeps.commands.run import attempt
        from sweeps.config.durations import parse_duration
        from sweeps.engine.cluster_address import find_address
        from sweeps.errors import SweepExists
        from sweeps.ledger.location import ledger_location
        from sweeps.ledger.warm_start import collect_warm_start
        from sweeps.path_checks import check_writable
        from sweeps.paths import SweepPaths, resolve_root
        from sweeps.search.dry_run import dry_run
        from sweeps.sweep_lock import is_held, read_holder, sweep_locked

        paths = SweepPaths(resolve_root(root), spec.name)
        check_writable(paths.root, "--root")
        if is_held(paths.lock):  # refuse early, before slow imports; acquiring the lock decides
            raise sweep_locked(paths.directory, read_holder(paths.lock))
        if paths.exists():
            raise SweepExists(paths)
        ledger_location(paths, spec).check_available()
        spinner.update("checking the search")
        dry_run(spec, collect_warm_start(paths.root, spec))
        seconds = parse_duration(grace, "--grace")
        code = attempt(
            paths,
            spec,
            out,
            err,
            new=True,
            grace=seconds,
            address=find_address(address),
            offline=offline,
            spinner=spinner,
        )
        raise typer.Exit(code)


@app.command(epilog="Example: sweep resume digits -s trials=40")
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
    from sweeps.commands import messages
    from sweeps.commands.lost_runs import has_lost_runs
    from sweeps.commands.run import attempt
    from sweeps.config.durations import parse_duration
    from sweeps.config.revisions import is_unchanged
    from sweeps.config.spec import parse_with_positions
    from sweeps.engine.cluster_address import find_address
    from sweeps.ledger.location import check_kept
    from sweeps.ledger.reader import of_search
    from sweeps.ledger.warm_start import WarmStart
    from sweeps.reconciliation.finishing import trials_to_finish
    from sweeps.results.findings import find
    from sweeps.search.dry_run import dry_run
    from sweeps.store_access import check_sampler_state, remember_named
    from sweeps.sweep_lock import sweep_locked

    with err.status("reading the sweep") as spinner, input_errors():
        view = view_of(name, root)
        if view.running:  # refuse early, before slow imports; acquiring the lock decides
            raise sweep_locked(view.paths.directory, view.holder)
        written, file = view.revision.text, str(view.paths.spec)
        spec, document = parse_with_positions(
            written, file, settings or [], drawn=len(of_search(view.records))
        )
        check_kept(view.paths, view.spec, spec)
        remember_named(spec, document)
        check_sampler_state(view.paths, spec)
        numbers = read_numbers("--finish", finish or ())
        to_finish = trials_to_finish(view.paths, spec, view.records, numbers)
        done = view.concluded and is_unchanged(view.spec, spec) and not to_finish
        if done and not has_lost_runs(view, err, offline=offline):
            outcome = view.outcome()
            spinner.stop()
            messages.outcome(out, err, outcome, view.paths, find(view))
            raise typer.Exit(outcome.exit_code)
        with document.attach_locations():
            spinner.update("checking the search")
            dry_run(spec, WarmStart.from_data(view.ledger.warm_start()))
            seconds = parse_duration(grace, "--grace")
            code = attempt(
                view.paths,
                spec,
                out,
                err,
                new=False,
                grace=seconds,
                address=find_address(address),
                accept_changes=accept_changes,
                finish=to_finish,
                offline=offline,
                spinner=spinner,
            )
        raise typer.Exit(code)


@app.command(epilog="Example: sweep stop digits --trial 3")
def stop(
    name: Name,
    trial: Annotated[
        int | None,
        typer.Option(
            parser=read_whole(0),
            metavar="K",
            help="End only this trial, which never resumes; the sweep need not run.",
            show_default=False,
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
    """Stop a running sweep, whose trials save and can resume; or end one trial."""
    from sweeps.commands import messages
    from sweeps.commands.end_trial import end_trial
    from sweeps.config.durations import parse_duration
    from sweeps.driver import stop_requests

    with input_errors():
        if now and trial is not None:
            raise stop_requests.NotRunningError(
                "--now and --trial exclude each other; a trial ends at its next step; "
                "leave one of them out"
            )
        paths, seconds = view_of(name, root).paths, parse_duration(timeout, "--timeout")
        with err.status("requesting the stop") as spinner:
            if trial is None:
                stopped = stop_requests.stop_sweep(
                    paths, now=now, seconds=seconds, say=spinner.update
                )
            else:
                try:
                    stopped = stop_requests.stop_trial(
                        paths, trial, seconds=seconds, say=spinner.update
                    )
                except stop_requests.NoDriverError:
                    stopped = end_trial(view_of(name, root), trial)
    show_found(stopped.as_dict(), as_json, lambda: messages.stopped(stopped, paths))
    if not stopped.done:
        raise typer.Exit(LATE)


app.command(epilog="Example: sweep trust https://mlflow.example")(trust)
app.command(name="list", epilog="Example: sweep list --root ~/runs")(inspect.list_command)
app.command(epilog="Example: sweep status digits --watch")(inspect.status)
app.command(epilog="Example: sweep trials digits --sort value --top 5")(inspect.trials)
app.command(epilog="Example: sweep show digits 3")(inspect.show)
app.command(epilog="Example: sweep logs digits 3 --follow")(logs)
app.command(epilog="Example: sweep best digits --export best/")(inspect.best)
app.command(name="test", epilog="Example: sweep test digits")(evaluate)
app.command(epilog="Example: sweep compare digits wider --top 3")(inspect.compare)
app.command(epilog="Example: sweep diff digits 3 8")(inspect.diff)
app.command(epilog="Example: sweep export digits --parquet tables/")(export)
app.command(epilog="Example: sweep report digits --output digits.html")(inspect.report)
app.command(epilog="Example: sweep clone digits wider -s trials=40")(clone)
app.command(epilog="Example: sweep du --root ~/runs")(du)
app.command(epilog="Example: sweep rm digits --mlflow")(rm)


@app.command(epilog="Example: sweep sync digits --verify")
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
    from sweeps.commands.sync import deliver

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


@app.command(epilog="Example: sweep ui digits --port 0")
def ui(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show only this sweep's runs.",
            show_default=False,
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
    from sweeps.commands import ui
    from sweeps.paths import resolve_root
    from tracking.ui import ServerError

    try:
        with input_errors():
            ui.serve(
                err,
                resolve_root(root),
                view_of(name, root) if name is not None else None,
                port=port,
                open_browser=open_browser,
            )
    except ServerError as error:
        fail(str(error), code=LATE)


@app.command(epilog="Example: sweep train sweep.yaml -s budget.epochs=2 --dir run1")
def train(
    file: Annotated[
        Path,
        typer.Argument(
            parser=read_path,
            metavar="FILE",
            help="The sweep's YAML file; with --trial, the name of a sweep.",
            show_default=False,
        ),
    ],
    settings: Overrides = None,
    trial: Annotated[
        int | None,
        typer.Option(
            parser=read_whole(0),
            metavar="K",
            help="Train this trial of a sweep again, exactly, and compare it with the trial.",
            show_default=False,
        ),
    ] = None,
    root: Root = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            parser=read_path,
            metavar="DIR",
            help="Save checkpoints there, and resume from them; default: keep nothing.",
            show_default=False,
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            parser=read_path,
            metavar="DIR",
            help="Write figures there: gradient norms, learning rate, metrics.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train one run in this process, without Ray, for use with a debugger."""
    from sweeps.commands.retrain import train_again
    from sweeps.commands.train import check_task, train_once
    from sweeps.path_checks import check_writable

    def check_places() -> None:
        for option, place in (("--dir", directory), ("--figures", figures)):
            if place is not None:
                check_writable(place, option)

    if trial is not None:
        if settings:
            fail(
                "-s and --trial exclude each other; --trial trains exactly what the trial "
                "trained; leave one of them out",
                code=WRONG_INPUT,
            )
        with input_errors():
            view = view_of(str(file), root)
            check_places()
            train_again(view, trial, directory, out, err, figures)
        return
    with _loaded(file, settings) as spec:
        check_places()
        check_task(spec, err, directory)
        train_once(spec, directory, out, err, figures)


@app.command(epilog="Example: sweep doctor --json")
def doctor(root: Root = None, as_json: AsJson = False) -> None:
    """Check versions, GPUs, disks and sweeps; remove what dead drivers left behind."""
    from sweeps.commands import render
    from sweeps.commands.doctor import (
        check_object_stores,
        check_stores,
        check_sweeps,
        clean_up,
        examine,
    )
    from sweeps.paths import resolve_root

    with input_errors():
        where = resolve_root(root)
        cleared = [
            *clean_up(where),
            *check_sweeps(where),
            *check_stores(where),
            *check_object_stores(where),
        ]
        findings = examine(where, cleared)
    show_found(
        [finding.as_dict() for finding in findings], as_json, lambda: render.findings(findings)
    )
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the `sweep` command."""
    os.umask(os.umask(0o077) | 0o002)  # keep the user's umask, but never write world-writable
    ignore_broken_pipes()
    try:
        app()
    finally:
        if "torch" not in sys.modules:  # torch's bindings report leaks after a freeze
            gc.freeze()  # saves the garbage collection at exit, which takes a second


@contextmanager
def _loaded(
    file: Path,
    settings: list[str] | None,
    *,
    name: str | None = None,
    tracking_uri: str | None = None,
    to_run: bool = False,
) -> Iterator[SweepSpec]:
    """Load a spec, and attach file positions to the errors of the code that uses it.

    Args:
        to_run: Trust the stores that the spec names, because the user asked to run it.
    """
    from sweeps.config.spec import load_with_positions
    from sweeps.store_access import remember_named

    with input_errors():
        spec, document = load_with_positions(
            file, settings or [], name=name, tracking_uri=tracking_uri
        )
        if to_run:
            remember_named(spec, document, file)
        with document.attach_locations():
            yield spec
