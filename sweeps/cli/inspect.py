"""The commands that only read: list, status, trials, show, logs, best, compare, report and others.

Each but `report` answers within a second, also with a thousand trials. They therefore import no
module that is slow to import. What must not live here: anything that changes a sweep.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from sweeps.cli.console import (
    AsJson,
    Name,
    Root,
    TrialNumber,
    err,
    fail,
    input_errors,
    out,
    path_option,
    read_whole,
    show_found,
    sweep_names,
    trial_numbers,
    trial_option,
    view_of,
)
from sweeps.cli.plain_console import TextTable, line
from sweeps.errors import LATE, NO_SUCCESS, WRONG_INPUT
from sweeps.formatting import format_bytes


def list_command(root: Root = None, as_json: AsJson = False) -> None:
    """List the sweeps below the root."""
    from sweeps.cli import messages, render
    from sweeps.paths import resolve_root
    from sweeps.view.sweep_view import statuses

    with input_errors():
        where, found = resolve_root(root), []
        for one in statuses(where):
            if isinstance(one, str):
                messages.sentence(err, one, style="yellow")
            else:
                found.append(one)
    show_found(found, as_json, lambda: render.sweeps(found, where))


def status(
    name: Name,
    watch: Annotated[
        bool, typer.Option("--watch", help="Update the display until the sweep stops.")
    ] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show the state and progress of a sweep, and what a finished one found."""
    from sweeps.cli import render
    from sweeps.trust.audit.read import audit_at_end, status_with_audit
    from sweeps.trust.findings import findings_at_end

    if watch and as_json:
        fail(
            "--watch and --json exclude each other; --watch redraws a table, --json prints once; "
            "omit one of them",
            code=WRONG_INPUT,
        )
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
    name: Name,
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
            help="Show the first N trials.",
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
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """List the trials of a sweep."""
    from sweeps.cli import render
    from sweeps.view.tables import select_rows, to_csv

    if as_csv and as_json:
        fail("--csv and --json exclude each other; leave one out", code=WRONG_INPUT)
    with input_errors():
        view = view_of(name, root)
        rows = view.trials() if as_json else view.rows()
        found = select_rows(rows, view.spec, sort=sort, top=top, state=state)
    if as_csv:
        out.file.write(to_csv(found, view.spec))
        return
    show_found(found, as_json, lambda: render.trials(found, view.spec))


def show(
    name: Name,
    trial: TrialNumber,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show one trial: parameters, reports, how and why it ended, and its files."""
    from sweeps.cli import render

    with input_errors():
        view = view_of(name, root)
        found = view.details(trial)
    show_found(found, as_json, lambda: render.trial(found, view.spec))


def best(
    name: Name,
    trial: Annotated[
        int | None, trial_option("Choose this trial, also a pruned one, instead of the best.")
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

    if pickled and register is None:
        fail("--pickle says how to register; add --register MODEL", code=WRONG_INPUT)
    if confirmed and trial is not None:
        fail(
            "--confirmed and --trial exclude each other; both choose a trial; leave one out",
            code=WRONG_INPUT,
        )
    with input_errors():
        view = view_of(name, root)
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
    said = None if leader is None else leader["said"]
    show_found(found, as_json, lambda: render.best(found, view.spec, written, lost, finish, said))


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="The sweeps' names.",
            autocompletion=sweep_names,
        ),
    ],
    top: Annotated[
        int,
        typer.Option(
            parser=read_whole(1), metavar="N", help="How many of the best trials of each sweep."
        ),
    ] = 5,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Compare the best trials of one or several sweeps, and the parameters that differ."""
    from sweeps.cli import render
    from sweeps.view.compare import compare as compare_best

    with input_errors():
        views = [view_of(name, root) for name in dict.fromkeys(names)]
        found = compare_best(views, top=top)
    specs = [view.spec for view in views]
    show_found(found, as_json, lambda: render.comparison(found, specs))
    if not as_json:
        render.pages(out, found)


def diff(
    name: Name,
    first: Annotated[
        int,
        typer.Argument(
            parser=read_whole(0),
            metavar="A",
            help="A trial's number.",
            autocompletion=trial_numbers,
        ),
    ],
    second: Annotated[
        int,
        typer.Argument(
            parser=read_whole(0),
            metavar="B",
            help="Another trial's number.",
            autocompletion=trial_numbers,
        ),
    ],
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show in which parameters two trials differ."""
    from sweeps.cli import render
    from sweeps.view.compare import differences

    with input_errors():
        view = view_of(name, root)
        found = differences(view, first, second)
    show_found(found, as_json, lambda: render.differences(found, view.spec))


def report(
    name: Name,
    output: Annotated[
        Path | None,
        path_option(
            "--output",
            "FILE",
            "The file to write; default: NAME-report.html in the working directory.",
        ),
    ] = None,
    root: Root = None,
) -> None:
    """Write an HTML report with all figures of a sweep, also while it runs."""
    from sweeps.artifacts.export import report as draw
    from sweeps.errors import NoReport

    with input_errors():
        view = view_of(name, root)
        try:
            with err.status("drawing"):
                written = draw(view, output or Path(f"{name}-report.html"))
        except NoReport as error:
            fail(str(error), code=WRONG_INPUT)
    out.print(f"wrote {written}", soft_wrap=True)


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
    from sweeps.view.sweep_progress import trial_output

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


def du(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show only this sweep.",
            autocompletion=sweep_names,
        ),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show how much space sweeps take: checkpoints, logs, ledger, outbox and report."""
    from sweeps.cli import messages
    from sweeps.paths import SweepPaths, resolve_root
    from sweeps.view.usage import sweep_usage, total_usage

    with input_errors(), err.status("measuring"):
        where = resolve_root(root)
        if name is not None:
            found = sweep_usage(SweepPaths(where, name))
            show_found(found, as_json, lambda: _table([found]))
            return
        everything = total_usage(
            where, lambda message: messages.sentence(err, message, style="yellow")
        )
    show_found(everything, as_json, lambda: _everything(everything))


def _everything(found: dict[str, Any]) -> RenderableType:
    """The table of all sweeps, and what else is below the root."""
    lines = [
        f"{what}: {format_bytes(found[key])}"
        for key, what in (("tracking", "MLflow's store"), ("removed", "half-removed sweeps"))
        if found[key]
    ]
    return Group(
        *([_table(found["sweeps"])] if found["sweeps"] else []),
        *map(line, [*lines, f"total: {format_bytes(found['total'])}"]),
    )


def _table(sweeps: Sequence[dict[str, Any]]) -> RenderableType:
    from sweeps.view.usage import KINDS

    columns = [*KINDS, "total"]
    table = TextTable(["sweep", *columns], right=columns)
    for one in sweeps:
        table.rows.append([one["name"], *(format_bytes(one[column]) for column in columns)])
    return table


def export(
    name: Name,
    csv: Annotated[
        Path | None,
        path_option("--csv", "DIR", "Write trials.csv and curves.csv into this directory."),
    ] = None,
    parquet: Annotated[
        Path | None,
        path_option(
            "--parquet", "DIR", "Write trials.parquet and curves.parquet into this directory."
        ),
    ] = None,
    root: Root = None,
) -> None:
    """Write the trials of a sweep and their curves as CSV or Parquet, also while it runs."""
    from sweeps.view.tables import write_tables

    with input_errors():
        view = view_of(name, root)
        if csv is not None and parquet is None:
            directory, kind = csv, "csv"
        elif parquet is not None and csv is None:
            directory, kind = parquet, "parquet"
        else:
            fail("one of --csv DIR and --parquet DIR is needed; write one", code=WRONG_INPUT)
        with err.status("reading"):
            written = write_tables(view, directory, kind)
        for file in written:
            out.print(f"wrote {file}", soft_wrap=True)
