"""Open the storage in which a run keeps its checkpoints.

What must not live here: how a storage works (`local`, `objects`).
"""

from __future__ import annotations

from pathlib import Path

from trainable.storage.generations import Files, RunFiles
from trainable.storage.local import LocalFiles


def files_of(run: Path, address: str | None = None) -> RunFiles:
    """Return the generations of the run in a directory: the one place that knows where they lie.

    Args:
        run: The run's directory; what is no generation lies there in any case.
        address: Where its generations lie, `s3://BUCKET/...`; None: in `checkpoints/` there.
    """
    if address is None:
        return LocalFiles.of(run)
    from trainable.storage.objects import open_run  # which most runs do not need

    return open_run(address, run)


def files_at(address: str) -> Files:
    """Return the generations at an address, to be read: a directory, or `s3://BUCKET/...`."""
    if "://" not in address:
        return LocalFiles(Path(address))
    from trainable.storage.objects import ObjectFiles, connect

    return ObjectFiles(connect(), address.partition("://")[2])
