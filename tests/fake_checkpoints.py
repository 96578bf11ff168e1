"""Make checkpoints without training, for tests that ignore their contents."""

from __future__ import annotations

import hashlib
from pathlib import Path

from trainable.store.generations import MANIFEST, STATE
from trainable.store.manifest import Generation, format_manifest


def commit(directory: Path, epoch: int, *, step: int) -> Path:
    """Commit a generation of the trial whose directory it is; returns the generation's."""
    content = f"state of epoch {epoch}".encode()
    path = directory / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / STATE).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    generation = Generation(
        str(path), epoch, step, epoch, "val/loss", "min", 0.1, len(content), digest
    )  # fmt: skip
    (path / MANIFEST).write_bytes(format_manifest(generation))
    return path
