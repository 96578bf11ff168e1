"""A file of rows: what a long benchmark has measured so far, a line of JSON for each search.

What the file has is not measured again, so that a benchmark can run in portions. What must not
live here: what is measured, and tables of it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def named_file(variable: str) -> Path:
    """Return the file that a variable of the environment names; without one, a new file."""
    named = os.environ.get(variable)
    return Path(named) if named else Path(tempfile.mkdtemp(prefix="rows-"), "rows.jsonl")


def read(rows: Path) -> list[Row]:
    """Return what a file of rows has; nothing if there is none."""
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def add_missing(
    rows: Path,
    names: Sequence[str],
    keys: Iterable[Sequence[Any]],
    measure: Callable[..., Row],
    *,
    seconds: float = float("inf"),
) -> None:
    """Measure what a file of rows does not have yet.

    Args:
        rows: The file.
        names: The fields that identify a row.
        keys: Their values in each row that is asked for, in the order in which they are measured.
        measure: Called with the values; returns the other fields.
        seconds: After so many no measurement begins.
    """
    deadline = time.monotonic() + seconds
    known = {tuple(row[name] for name in names) for row in read(rows)}
    with rows.open("a", encoding="utf-8") as file:
        for key in keys:
            if tuple(key) in known or time.monotonic() > deadline:
                continue
            row = dict(zip(names, key, strict=True)) | measure(*key)
            file.write(json.dumps(row) + "\n")
            file.flush()
