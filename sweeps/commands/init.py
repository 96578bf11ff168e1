"""`sweep init`: write a starter spec and a task module.

What must not live here: the files (`operations.starter`).
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from sweeps.commands.console import input_errors, out, read_path
from sweeps.paths import PROGRAM, program_name


def init(
    directory: Annotated[
        Path,
        typer.Argument(
            parser=read_path, metavar="DIR", help="Where to write; created when missing."
        ),
    ] = Path(),
) -> None:
    """Write a starter spec and a task module to edit."""
    from sweeps.operations.starter import write_starter

    with input_errors():
        written = write_starter(directory)
    for path in written:
        out.print(f"wrote {path}")
    where, program = "", program_name()
    if directory != Path():
        where = f"cd {shlex.quote(str(directory))} && "
        if program != PROGRAM:
            program = os.path.relpath(program, directory)
    run = shlex.join((program, "run", "sweep.yaml"))
    out.print(f"run it with: {where}{run}", soft_wrap=True)
