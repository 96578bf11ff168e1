"""The commands about what is stored: sync, ui, trust and rm.

What must not live here: what they do (`run`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType

from sweeps.cli.console import (
    AsJson,
    Name,
    Root,
    err,
    fail,
    input_errors,
    out,
    read_whole,
    show_found,
    sweep_names,
    view_of,
)
from sweeps.cli.plain_console import line
from sweeps.errors import LATE, WRONG_INPUT
from sweeps.formatting import format_bytes

if TYPE_CHECKING:
    from sweeps.run.removal import Removal


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
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="The sweep whose page is opened.",
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


def trust(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS",
            help="Stores to allow, or file:// and a directory; none: list them.",
        ),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the addresses from the list instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Allow sending credentials to a store, or writing to a directory outside of a root."""
    from sweeps.cli import messages
    from sweeps.errors import UserError
    from tracking import trusted_stores
    from tracking.address import origin_of

    with input_errors():
        for address in addresses or ():
            if not trusted_stores.can_be_trusted(address):
                raise UserError(
                    "the address is not valid; it is SCHEME://HOST:PORT, without a password, as "
                    "tracking.uri has it; write for example https://mlflow.example or "
                    "postgresql://db.example"
                )
        for address in addresses or ():
            origin = origin_of(address)
            if not forget:
                trusted_stores.add_trusted(address, explicit=True)
                what = (
                    "sweeps may write to"
                    if origin.startswith("file:")
                    else "credentials may be sent to"
                )
                message = f"{what} {origin}"
            elif trusted_stores.remove_trusted(address):
                message = f"{origin} is removed from {trusted_stores.trust_file()}"
            else:
                message = f"{origin} was not in {trusted_stores.trust_file()}"
            if not as_json:
                messages.sentence(out, message, style="")
        found = trusted_stores.trusted()
    if as_json or not addresses:
        show_found(found, as_json, lambda: "\n".join(found) or "no store is trusted yet")


_INTERRUPTED = 130


def rm(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Delete its MLflow runs, too; they can be restored.")
    ] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Remove a sweep: its files, and its objects in a store."""
    from sweeps.paths import SweepPaths, resolve_root
    from sweeps.run.removal import plan_removal, remove

    with input_errors():
        paths = SweepPaths(resolve_root(root), name)
        with err.status("measuring"):
            planned = plan_removal(paths, runs=mlflow)
        if not yes:
            _ask(planned)
        try:
            with err.status("removing"):
                for one in planned:
                    remove(one)
        except KeyboardInterrupt:
            options = ["--yes", *(["--mlflow"] if mlflow else [])]
            err.print(
                f"interrupted; complete it with: {paths.command('rm', *options)}", soft_wrap=True
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
        lines = [f"sweep '{one.paths.name}': {one.num_trials} trials, {size} at {one.directory}"]
    if one.objects is not None:
        objects = format_bytes(one.num_object_bytes)
        lines.append(f"  {one.num_objects} objects, {objects}, at {one.objects}")
    if one.run_ids:
        lines.append(f"  {len(one.run_ids)} MLflow runs")
    if one.num_waiting:
        sync = one.paths.command("sync")
        lines.append(
            f"  {one.num_waiting} records are not delivered yet; deliver them with: {sync}"
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
    parts = [f"{last.num_trials} trials, {size}"]
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
