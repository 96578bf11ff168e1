"""`sweep clone`: write the spec of a new sweep that is configured as an existing one.

What must not live here: starting the new sweep (`run`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sweeps.commands.console import Name, Overrides, Root, err, input_errors, out

if TYPE_CHECKING:
    from sweeps.paths import SweepPaths


def clone(
    name: Name,
    new: Annotated[
        str, typer.Argument(metavar="NEW", help="The new sweep's name.", show_default=False)
    ],
    settings: Overrides = None,
    root: Root = None,
) -> None:
    """Write NEW.yaml, the spec of a new sweep with the configuration of another one."""
    from sweeps.commands import messages
    from sweeps.paths import SweepPaths, command_line, resolve_root

    with input_errors():
        paths = SweepPaths(resolve_root(root), name)
        written, changed, damage = _write(paths, new, settings or [])
    if damage:
        messages.sentence(err, damage, style="yellow")
    out.print(f"wrote {written}; changed: {changed}", soft_wrap=True)
    run = command_line(paths.root, "run", str(written))
    out.print(f"run it with: {run}", soft_wrap=True)


def _write(paths: SweepPaths, new: str, settings: list[str]) -> tuple[Path, str, str | None]:
    """Write the spec of a new sweep into the working directory.

    Returns:
        The file, the changes in one line, and a message about a damaged revision.

    Raises:
        UnknownSweep: There is no sweep to clone.
        UserError: The new name is not valid, or the file exists or cannot be written.
        SweepExists: There is a sweep of the new name.
        SpecError: A setting is wrong.
        StoreUntrusted: A store is named by a sweep of another user, and is not trusted.
    """
    from sweeps.config.revisions import describe_changes, read_spec
    from sweeps.config.spec import parse_with_positions
    from sweeps.errors import SweepExists, UserError
    from sweeps.paths import SweepPaths
    from sweeps.results.sweep_status import UnknownSweep
    from sweeps.store_access import check_stores

    target = SweepPaths(paths.root, new)  # checks the name
    if not paths.exists():
        raise UnknownSweep(paths.name, paths.root)
    if target.exists():
        raise SweepExists(target, "choose another name")
    before = read_spec(paths.spec)
    spec, document = parse_with_positions(before.text, str(paths.spec), settings, name=new)
    check_stores(paths, spec, document)
    changed = describe_changes(before.spec, spec)
    file = Path(f"{new}.yaml")
    text = f"# A clone of sweep '{paths.name}'; changed: {changed}\n{spec.to_yaml()}"
    try:
        with file.open("x", encoding="utf-8") as opened:  # "x": never overwrite
            opened.write(text)
    except FileExistsError:
        raise UserError(
            f"{file} exists already; nothing is overwritten; remove it, or choose another name"
        ) from None
    return file, changed, before.damage
