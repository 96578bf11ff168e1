"""The commands that keep order: list with the sizes of sweeps and their removal, sync, and ui.

What must not live here: what they do (`run`, `view.usage`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

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
    read_whole,
    show_found,
    view_of,
)
from sweeps.cli.plain_console import TextTable, line
from sweeps.errors import LATE, WRONG_INPUT
from sweeps.formatting import counted, format_bytes

if TYPE_CHECKING:
    from sweeps.paths import SweepPaths
    from sweeps.run.removal import Removal


def list_command(
    name: Annotated[str | None, name_argument("Only this sweep.")] = None,
    sizes: Annotated[
        bool,
        typer.Option(
            "--sizes", help="Show how much space each takes: checkpoints, logs, ledger and others."
        ),
    ] = False,
    remove: Annotated[
        bool,
        typer.Option("--remove", help="Remove the sweep: its files, and its objects in a store."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --remove, do not ask.")] = False,
    mlflow: Annotated[
        bool,
        typer.Option(
            "--mlflow", help="With --remove, delete its MLflow runs, too; they can be restored."
        ),
    ] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """List the sweeps, show their sizes, or remove one."""
    from sweeps.cli import messages, render
    from sweeps.paths import SweepPaths, resolve_root
    from sweeps.view.sweep_view import statuses
    from sweeps.view.usage import sweep_usage, total_usage

    at_most_one({"--sizes": sizes, "--remove": remove})
    only_with("--remove", remove, {"--yes": yes, "--mlflow": mlflow})
    only_with("NAME", name, {"--remove": remove})

    def warn(message: str) -> None:
        messages.sentence(err, message, style="yellow")

    with input_errors():
        where = resolve_root(root)
        paths = None if name is None else SweepPaths(where, name)
        if remove and paths is not None:
            _remove(paths, yes=yes, mlflow=mlflow, as_json=as_json)
        elif sizes:
            with err.status("measuring"):
                found = total_usage(where, warn) if paths is None else sweep_usage(paths)
            text = _everything if paths is None else lambda one: _table([one])
            show_found(found, as_json, lambda: text(found))
        else:
            listed = []
            for one in statuses(where) if name is None else [view_of(name, root).status()]:
                if isinstance(one, str):
                    warn(one)
                else:
                    listed.append(one)
            show_found(listed, as_json, lambda: render.sweeps(listed, where))


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


def sync(
    name: Name = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Compare the whole tracking store with the trials' own files."
        ),
    ] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Deliver waiting records, and draw missing figures."""
    from sweeps.cli import messages, render
    from sweeps.run.sync import deliver

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


def ui(
    name: Annotated[str | None, name_argument("The sweep whose page is opened.")] = None,
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
    """Open the live page of a sweep, and MLflow; without NAME, MLflow alone."""
    from sweeps.paths import resolve_root
    from sweeps.run.ui import serve
    from tracking.ui import ServerError

    def say(message: str) -> None:
        err.print(message, soft_wrap=True)

    try:
        with input_errors():
            serve(
                say,
                resolve_root(root),
                view_of(name, root) if name is not None else None,
                port=port,
                open_browser=open_browser,
                doing=err.status,
            )
    except ServerError as error:
        fail(str(error), code=LATE)


_INTERRUPTED = 130


def _remove(paths: SweepPaths, *, yes: bool, mlflow: bool, as_json: bool) -> None:
    from sweeps.run.removal import plan_removal, remove

    with err.status("measuring"):
        planned = plan_removal(paths, runs=mlflow)
    if not yes:
        _ask(planned)
    try:
        with err.status("removing"):
            for one in planned:
                remove(one)
    except KeyboardInterrupt:
        options = ["--remove", "--yes", *(["--mlflow"] if mlflow else [])]
        err.print(
            f"interrupted; complete it with: {paths.command('list', *options)}", soft_wrap=True
        )
        raise typer.Exit(_INTERRUPTED) from None
    show_found([one.as_dict() for one in planned], as_json, lambda: _removed(planned))


def _ask(planned: Sequence[Removal]) -> None:
    """Ask on standard error; exits unless the answer is yes."""
    for one in planned:
        for text in _sentences(one):
            err.print(text, soft_wrap=True)
    err.print("Remove this for good? [y/N] ", end="")
    answer = sys.stdin.readline()
    if not answer:
        err.print()
        fail(
            "nothing was removed: there is no terminal to ask; a sweep is removed only after a "
            "yes; add --yes",
            code=WRONG_INPUT,
        )
    if answer.strip().lower() not in ("y", "yes"):
        out.print("nothing was removed")
        raise typer.Exit(LATE)


def _sentences(one: Removal) -> list[str]:
    """What is to be removed, in lines."""
    size = format_bytes(one.num_bytes)
    if one.directory != one.paths.directory:
        lines = [f"{one.directory}: the rest of an interrupted removal, {size}"]
    else:
        trials = counted(one.num_trials, "trial")
        lines = [f"sweep '{one.paths.name}': {trials}, {size} at {one.directory}"]
    if one.objects is not None:
        objects = format_bytes(one.num_object_bytes)
        lines.append(f"  {one.num_objects} objects, {objects}, at {one.objects}")
    if one.run_ids:
        lines.append(f"  {len(one.run_ids)} MLflow runs")
    if one.num_waiting:
        sync = one.paths.command("sync")
        lines.append(
            f"  not delivered yet: {counted(one.num_waiting, 'record')}; deliver with: {sync}"
        )
    if one.owner is not None:
        lines.append(f"  it is a copy: what {one.owner} keeps elsewhere stays")
    if one.links:
        links = ", ".join(f"{path} -> {path.readlink()}" for path in one.links[:3])
        more = f" and {len(one.links) - 3} more" if len(one.links) > 3 else ""
        lines.append(f"  what symbolic links lead to stays: {links}{more}")
    return lines


def _removed(planned: Sequence[Removal]) -> RenderableType:
    """The lines of a completed removal."""
    from sweeps.paths import tracking_place
    from tracking.address import is_database

    last = planned[-1]
    size = format_bytes(sum(one.num_bytes for one in planned))
    parts = [f"{counted(last.num_trials, 'trial')}, {size}"]
    if objects := sum(one.num_objects for one in planned):
        freed = format_bytes(sum(one.num_object_bytes for one in planned))
        parts.append(f"{objects} objects, {freed}, in the object store")
    runs = sum(len(one.run_ids) for one in planned)
    if runs:
        parts.append(f"{runs} MLflow runs")
    lines = [f"removed sweep '{last.paths.name}': {'; '.join(parts)}"]
    address, _ = tracking_place(last.spec.tracking.uri if last.spec else None, last.paths.root)
    if runs and is_database(address):
        command = shlex.join(("mlflow", "gc", "--backend-store-uri", address))
        lines.append(f"the runs are in MLflow's trash, whose space is freed by: {command}")
    return Group(*map(line, lines))
