"""Make checkpoints without training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainable.checkpoint import CheckpointStore
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


def save_if_due(
    store: CheckpointStore,
    state: Callable[[], dict[str, Any]],
    *,
    step: int,
    epoch: int,
    new_best: bool = False,
    final: bool = False,
    **options: Any,
) -> bool:
    """Save as a loop does after an epoch, 0: within one; return whether it was due."""
    completed, certain = epoch or None, final or new_best
    due = store.is_due(step=step, epoch=completed, report=completed, certain=certain)
    if due:
        store.save(state, step=step, reports=epoch, final=final, **options)
    return due
