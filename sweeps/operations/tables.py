"""Write a sweep's trials and curves as files, for other programs.

What must not live here: how trials and curves are read (`frames`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from redaction.escapes import spreadsheet_cell
from sweeps.operations.frames import curves_frame, trials_frame
from sweeps.path_checks import check_file, check_private, make_private
from sweeps.results.sweep_status import SweepStatus
from trainable.storage.regular_files import replace_regular

if TYPE_CHECKING:
    import pandas as pd


def write_tables(view: SweepStatus, directory: Path, kind: str) -> list[Path]:
    """Write `trials` and `curves` of a sweep into a directory.

    Returns:
        The files written.
    """
    targets = [directory / f"{stem}.{kind}" for stem in ("trials", "curves")]
    check_private(directory, f"--{kind}")
    for target in targets:
        check_file(target, f"--{kind}")
    frames = [
        trials_frame(view).reset_index(),
        curves_frame(view, range(len(view.records)), view.spec.metrics),
    ]
    # Made whole before a file is: pandas takes some paths for addresses.
    tables = [_csv(frame) if kind == "csv" else frame.to_parquet() for frame in frames]
    place = make_private(directory, f"--{kind}")
    for table, target in zip(tables, targets, strict=True):
        replace_regular(place / target.name, table)
    return targets


def _csv(frame: pd.DataFrame) -> bytes:
    """Return a table as CSV, which a spreadsheet shows as it is."""
    texts = frame.select_dtypes(exclude=["number", "bool", "datetime", "datetimetz"])
    frame = frame.assign(**{name: texts[name].map(spreadsheet_cell) for name in texts})
    text: str = frame.to_csv(index=False, header=[*map(spreadsheet_cell, frame)])
    return text.encode()
