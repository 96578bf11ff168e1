"""The commands that look: status, trials, show, best, compare, report.

Each but `report` answers within a second, also with a thousand trials. They therefore import no
module that is slow to import. What must not live here: anything that changes a sweep.
"""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sweeps.cli.console import (
    AsJson,
    Name,
    Root,
    at_most_one,
    err,
    fail,
    input_errors,
    name_argument,
    only_with,
    out,
    path_option,
    read_whole,
    show_found,
    trial_argument,
    trial_numbers,
    view_and_trials,
    view_of,
)
from sweeps.errors import LATE, NO_SUCCESS, WRONG_INPUT

if TYPE_CHECKING:
    from sweeps.view.sweep_view import SweepView


def status(
    name: Name = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Update the display until the sweep stops.")
    ] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show the state and progress of a sweep, and what it found."""
    from sweeps.cli import render
    from sweeps.trust.audit.read import audit_at_end, status_with_audit
    from sweeps.trust.findings import findings_at_end

    at_most_one({"--watch": watch, "--json": as_json})
    if watch:
        with input_errors():
            render.watch(out, lambda: view_of(name, root))
        return
    with input_errors():
        view = view_of(name, root)
        found = status_with_audit(view) if as_json else view.status()
        findings = None if as_json else findings_at_end(view)
        audit = None if as_json else audit_at_end(view)
    show_found(found, as_json, lambda: render.status(found, view, findings, audit))


def trials(
    name: Name = None,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort",
            metavar="COLUMN",
            help="Sort by `value` (the best first), a parameter, epoch, step, state or duration.",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            parser=read_whole(1),
            metavar="N",
            help="Show the first N trials; without --sort, the best.",
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Show trials that are waiting, running, complete, pruned or failed.",
        ),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """List the trials of a sweep."""
    from sweeps.cli import render
    from sweeps.view.tables import select_rows

    with input_errors():
        view = view_of(name, root)
        rows = view.trials() if as_json else view.rows()
        found = select_rows(rows, view.spec, sort=sort, top=top, state=state)
    show_found(found, as_json, lambda: render.trials(found, view.spec))


def show(
    name: Name = None,
    trial: Annotated[int | None, trial_argument("The trial's number.")] = None,
    log: Annotated[
        bool,
        typer.Option(
            "--log", help="Print its output: its own prints, warnings, and how its process ended."
        ),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="With --log, print new lines until the trial ends."),
    ] = False,
    diff: Annotated[
        int | None,
        typer.Option(
            "--diff",
            parser=read_whole(0),
            metavar="TRIAL",
            help="Show in which parameters another trial differs.",
            autocompletion=trial_numbers,
        ),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show one trial: parameters, reports, its end and why; or its log."""
    from sweeps.cli import render
    from sweeps.view.compare import differences

    at_most_one({"--log": log, "--diff": diff, "--json": as_json and log})
    only_with("--log", log, {"--follow": follow})
    with input_errors():
        view, numbers = view_and_trials(name, [trial], root)
        if not numbers:
            fail(
                "no TRIAL was given; this command shows one trial; write its number, as "
                f"{view.paths.command('trials')} lists them",
                code=WRONG_INPUT,
            )
        (number,) = numbers
        if log:
            _print_log(view, number, follow=follow)
        elif diff is not None:
            differing = differences(view, number, diff)
            show_found(differing, as_json, lambda: render.differences(differing, view.spec))
        else:
            found = view.details(number)
            show_found(found, as_json, lambda: render.trial(found, view.spec))


def _print_log(view: SweepView, trial: int, *, follow: bool) -> None:
    from sweeps.view.sweep_progress import trial_output

    is_empty = True
    for text in trial_output(view, trial, follow=follow):
        sys.stdout.write(text)
        sys.stdout.flush()
        is_empty = is_empty and not text
    if is_empty:
        show = view.paths.command("show", str(trial))
        err.print(f"trial {trial} has printed nothing; see: {show}", soft_wrap=True)


def best(
    name: Name = None,
    trial: Annotated[
        int | None, trial_argument("Choose this trial, also a pruned one, instead of the best.")
    ] = None,
    confirmed: Annotated[
        bool,
        typer.Option("--confirmed", help="Choose the winner of `sweep confirm`."),
    ] = False,
    export: Annotated[
        Path | None,
        path_option("--export", "DIR", "Write the trial's weights and configuration there."),
    ] = None,
    register: Annotated[
        str | None,
        typer.Option(
            "--register",
            metavar="MODEL",
            help="Register the model in MLflow under this name, with the alias `best`.",
        ),
    ] = None,
    pickled: Annotated[
        bool,
        typer.Option(
            "--pickle",
            help="Register a pickle of the model instead of a graph; loading it runs code.",
        ),
    ] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show the best trial, export it, or register its model."""
    from sweeps.artifacts import export as artifacts
    from sweeps.cli import messages, render
    from sweeps.errors import NoVersion
    from sweeps.run.task_code import enter_code_directory
    from sweeps.trust.confirm import confirmed_trial, leader_in_confirmation
    from sweeps.view.sweep_view import NoBest

    only_with("--register", register, {"--pickle": pickled})
    with input_errors():
        view, numbers = view_and_trials(name, [trial], root)
        trial = next(iter(numbers), None)
        at_most_one({"--confirmed": confirmed, "TRIAL": trial})
        artifacts.check(view, directory=export, model=register)
        try:
            if confirmed:
                trial = confirmed_trial(view).number
            if view.several and trial is None and export is None and register is None:
                front = view.front()
                best = [view.trial(record) for record in front]
                lost = view.lost_weights(*front)
                show_found(
                    best, as_json, lambda: messages.front_table(best, view.spec, view.paths, lost)
                )
                return
            found = view.best(trial)
            leader = leader_in_confirmation(view, found["number"])
            if leader is not None:
                found["confirmation"] = leader
            written = artifacts.export(view, export, trial) if export is not None else []
            if register is not None:
                with err.status("registering") as spinner:
                    enter_code_directory(view, spinner.update)
                    number = view.select_weights(trial).number
                    version = artifacts.register(view, number, register, pickled=pickled)
                found["registered"] = {"model": register, "version": version}
        except NoBest as error:
            fail(str(error), code=NO_SUCCESS)
        except NoVersion as error:
            fail(str(error), code=LATE)
    record = view.record(found["number"])
    weights = view.select_weights(trial)
    lost = view.lost_weights(weights)
    if lost is not None and not weights.lacks_model:  # else the checkpoint itself is there
        found["best_checkpoint"] = None
    finish = view.finish_command(record)
    show_found(found, as_json, lambda: render.best(found, view.spec, written, lost, finish))


def compare(
    names: Annotated[
        list[str] | None,
        name_argument("The sweeps' names; default: the only or the newest sweep."),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            parser=read_whole(1), metavar="N", help="How many of the best trials of each sweep."
        ),
    ] = 5,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Compare the best trials of sweeps, and parameters that differ."""
    from sweeps.cli import render
    from sweeps.view.compare import compare as compare_best

    with input_errors():
        chosen: Iterable[str | None] = dict.fromkeys(names) if names else [None]
        views = [view_of(name, root) for name in chosen]
        found = compare_best(views, top=top)
    specs = [view.spec for view in views]
    show_found(found, as_json, lambda: render.comparison(found, specs))
    if not as_json:
        render.pages(out, found)


def report(
    name: Name = None,
    output: Annotated[
        Path | None,
        path_option(
            "--output",
            "FILE",
            "The file to write; default: NAME-report.html in the working directory.",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    csv: Annotated[
        Path | None,
        path_option(
            "--csv", "DIR", "Write trials.csv and curves.csv into this directory instead."
        ),
    ] = None,
    parquet: Annotated[
        Path | None,
        path_option("--parquet", "DIR", "Write trials.parquet and curves.parquet there instead."),
    ] = None,
    root: Root = None,
) -> None:
    """Write a page with all figures of a sweep, or its tables."""
    from sweeps.artifacts.export import report as draw
    from sweeps.errors import NoReport
    from sweeps.view.tables import write_tables

    at_most_one({"--csv": csv, "--parquet": parquet, "--output": output})
    at_most_one({"--csv": csv, "--parquet": parquet, "--open": open_page})
    with input_errors():
        view = view_of(name, root)
        if (tables := csv or parquet) is not None:
            with err.status("reading"):
                written = write_tables(view, tables, "csv" if csv else "parquet")
        else:
            try:
                with err.status("drawing"):
                    written = [draw(view, output or Path(f"{view.paths.name}-report.html"))]
            except NoReport as error:
                fail(str(error), code=WRONG_INPUT)
    for file in written:
        out.print(f"wrote {file}", soft_wrap=True)
    if open_page:
        webbrowser.open(written[0].absolute().as_uri())
