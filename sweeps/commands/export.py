"""`sweep export`: write a sweep's trials and curves as tables, for other programs.

What must not live here: how trials and curves are read (`api.frames`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sweeps.commands.console import Name, Root, err, fail, input_errors, out, read_path
from sweeps.exit_codes import WRONG_INPUT


def export(
    name: Name,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            parser=read_path,
            metavar="DIR",
            help="Write trials.csv and curves.csv into this directory.",
            show_default=False,
        ),
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(
            "--parquet",
            parser=read_path,
            metavar="DIR",
            help="Write trials.parquet and curves.parquet into this directory.",
            show_default=False,
        ),
    ] = None,
    root: Root = None,
) -> None:
    """Write the trials of a sweep and their curves as CSV or Parquet, also while it runs."""
    from sweeps.api.sweep import Sweep
    from sweeps.path_checks import check_file, check_private

    with input_errors():
        sweep = Sweep.open(name, root=root)
        if (csv is None) == (parquet is None):
            fail("one of --csv DIR and --parquet DIR is needed; write one", code=WRONG_INPUT)
        directory, kind = (csv, "csv") if csv is not None else (parquet, "parquet")
        assert directory is not None
        targets = [directory / f"{stem}.{kind}" for stem in ("trials", "curves")]
        check_private(directory, f"--{kind}")
        for target in targets:
            check_file(target, f"--{kind}")
        with err.status("reading"):
            frames = [sweep.trials().reset_index(), sweep.curves()]
            # Made whole before a file is: pandas takes some paths for addresses.
            tables = [
                frame.to_csv(index=False).encode() if kind == "csv" else frame.to_parquet()
                for frame in frames
            ]
        directory.mkdir(parents=True, exist_ok=True)
        for table, target in zip(tables, targets, strict=True):
            aside = target.with_name(f".{target.name}.writing")
            aside.write_bytes(table)
            aside.replace(target)
            out.print(f"wrote {target}", soft_wrap=True)
