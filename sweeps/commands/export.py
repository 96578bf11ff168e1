"""`sweep export`: write a sweep's trials and curves as tables, for other programs.

What must not live here: how they are written (`operations.tables`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sweeps.commands.console import Name, Root, err, fail, input_errors, out, path_option, view_of
from sweeps.exit_codes import WRONG_INPUT


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
    from sweeps.operations.tables import write_tables

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
