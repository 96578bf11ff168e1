"""Choose and open the storage in which a run keeps its checkpoints.

What must not live here: how a storage works (`local.py`, `objects.py`).
"""

from __future__ import annotations

from pathlib import Path

from trainable.store.generations import Files, RunFiles
from trainable.store.local import LocalFiles


def files_of(run: Path, address: str | None = None) -> RunFiles:
    """Return the storage of a run's generations. Only this function decides which one it is."""
    if address is None:
        return LocalFiles.of(run)
    return open_run(address, run)


def files_at(address: str) -> Files:
    """Return the generations at an address for reading: a directory, or `s3://BUCKET/...`."""
    if "://" not in address:
        return LocalFiles(Path(address))
    return ObjectFiles(connect(), address.partition("://")[2])
