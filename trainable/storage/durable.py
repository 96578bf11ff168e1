"""Write files and directories so that they survive a power loss once a call returns.

What must not live here: what is in them, and opening files that others wrote
(`regular_files.py`).
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import BinaryIO

from trainable.storage.regular_files import replace_regular


def make_directory(path: Path) -> None:
    """Make a directory and its parents, so that they survive a power loss."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def probe_directory(path: Path) -> None:
    """Write, sync and remove a small file in a directory; raises OSError where that fails."""
    probe = path / f".probe-{uuid.uuid4().hex[:12]}"
    try:
        with probe.open("xb") as file:
            file.write(bytes(4096))
            sync_open_file(file)
    finally:
        probe.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Make a file and its name survive a power loss."""
    sync_directory(path)
    sync_directory(path.parent)


def replace_file(path: Path, text: str) -> None:
    """Replace a small file atomically; it survives a power loss once this returns."""
    replace_regular(path, text.encode(), durable=True)
    sync_directory(path.parent)


def sync_open_file(file: BinaryIO) -> None:
    """Make a file's content survive a power loss."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make a directory's entries survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
