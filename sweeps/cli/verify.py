"""`sweep verify`: compare all records of a sweep, and print what contradicts.

What must not live here: the comparison (`trust.verification`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from sweeps.cli.console import AsJson, Name, Root, err, input_errors, show_found
from sweeps.cli.plain_console import line
from sweeps.exit_codes import LATE

if TYPE_CHECKING:
    from sweeps.trust.verification import Verification


def verify(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Compare all files that a sweep keeps with each other; nothing is changed."""
    with err.status("reading the sweep") as spinner, input_errors():
        from sweeps.paths import SweepPaths, resolve_root
        from sweeps.trust import verification

        paths = SweepPaths(resolve_root(root), name)
        found = verification.verify(paths, spinner.update)
    show_found(found.as_dict(), as_json, lambda: Group(*_verify_lines(found, name)))
    if found.contradictions:
        raise typer.Exit(LATE)


def _verify_lines(found: Verification, name: str) -> Iterator[RenderableType]:
    count = len(found.contradictions)
    if count:
        word = "contradiction" if count == 1 else "contradictions"
        yield Text(f"sweep '{name}' has {count} {word}", style="bold red")
    else:
        yield Text(f"sweep '{name}' is sound", style="bold green")
    for one in found.contradictions:
        yield line(f"- {one}")
    if found.checked:
        yield line(f"compared: {'; '.join(found.checked)}")
    for note in found.notes:
        yield line(note)
