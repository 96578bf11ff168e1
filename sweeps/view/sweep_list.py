"""The status of every sweep below a root.

What must not live here: the status of one sweep (`sweep_view`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps.errors import LedgerError, RevisionError, SpecError, UserError
from sweeps.paths import SweepPaths, list_sweeps
from sweeps.view.sweep_view import SweepView
from tracking.trusted_stores import StoreUntrusted


def statuses(root: Path) -> Iterator[dict[str, Any] | str]:
    """Yield each sweep's status; a sentence if it cannot be read."""
    if root.exists() and not root.is_dir():
        raise UserError(
            f"--root {root}: is a file; the root is the directory that holds all sweeps; "
            "name that directory"
        )
    yield from map(_status, list_sweeps(root))


def _status(paths: SweepPaths) -> dict[str, Any] | str:
    try:
        return SweepView(paths).status()
    except (RevisionError, SpecError, LedgerError, StoreUntrusted, OSError) as error:
        return str(error)  # the other sweeps are still listed
