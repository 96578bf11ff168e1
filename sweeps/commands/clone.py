"""`sweep clone`: write the spec of a new sweep that is configured as an existing one.

What must not live here: the new spec (`operations.clone`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from sweeps.commands.console import Name, Overrides, Root, err, input_errors, out


def clone(
    name: Name,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new sweep's name.")],
    settings: Overrides = None,
    root: Root = None,
) -> None:
    """Write NEW.yaml, the spec of a new sweep with the configuration of another one."""
    from sweeps.commands import messages
    from sweeps.operations.clone import write_clone
    from sweeps.paths import SweepPaths, command_line, resolve_root

    with input_errors():
        paths = SweepPaths(resolve_root(root), name)
        written, changed, damage = write_clone(paths, new, settings or [])
    if damage:
        messages.sentence(err, damage, style="yellow")
    out.print(f"wrote {written}; changed: {changed}", soft_wrap=True)
    run = command_line(paths.root, "run", str(written))
    out.print(f"run it with: {run}", soft_wrap=True)
