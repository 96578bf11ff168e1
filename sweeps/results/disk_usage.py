"""Measure how much space the files of a sweep take, by kind; symbolic links are not followed.

What must not live here: removing files (`commands.removal`), and tables (`commands.render`).
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sweeps.config.spec import SweepSpec
from sweeps.paths import SweepPaths
from sweeps.store_access import check_store

KINDS = ("checkpoints", "logs", "ledger", "outbox", "report", "other")
"""What takes space in a sweep's directory."""
_OF_A_TRIAL = {"checkpoints": "checkpoints", "inherited": "checkpoints", "figures": "report"}


class DirectoryUsage(NamedTuple):
    """The space that a directory takes."""

    sizes: dict[str, int]
    """Bytes by kind."""
    links: list[Path]
    """Its symbolic links, which are not followed."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sizes.values())


def directory_usage(directory: Path) -> DirectoryUsage:
    """Measure a sweep's directory; a file with several hard links counts once.

    Files that disappear meanwhile are left out, because a sweep may be running.
    """
    sizes, links = dict.fromkeys(KINDS, 0), []
    seen: set[tuple[int, int]] = set()
    for entry in _entries(directory):
        if entry.is_symlink():
            links.append(Path(entry.path))
            continue
        with contextlib.suppress(FileNotFoundError):
            found = entry.stat(follow_symlinks=False)
            if found.st_nlink > 1:
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
            sizes[_kind(Path(entry.path).relative_to(directory).parts)] += found.st_size
    return DirectoryUsage(sizes, links)


def tree_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory; 0 without one."""
    if path.is_dir() and not path.is_symlink():
        return directory_usage(path).total
    return path.lstat().st_size if os.path.lexists(path) else 0


def sweep_usage(paths: SweepPaths, spec: SweepSpec) -> dict[str, Any]:
    """Return an object of `sweep du --json`: a sweep's bytes by kind.

    Checkpoints in an object store are counted there.

    Raises:
        StoreUntrusted: The object store is not trusted.
        StoreUnusable: The object store does not answer.
    """
    sizes: Counter[str] = Counter(directory_usage(paths.directory).sizes)
    objects = sweep_objects(paths, spec)
    sizes["checkpoints"] += sum(objects.values())
    return {
        "name": paths.name,
        **{kind: sizes[kind] for kind in KINDS},
        "total": sizes.total(),
        "object_store": objects_prefix(paths, spec),
    }


def objects_prefix(paths: SweepPaths, spec: SweepSpec) -> str | None:
    """Return the prefix of all objects of a sweep, `s3://...`; None without an object store."""
    prefix = spec.storage.checkpoints
    return None if prefix is None else f"{prefix}/{paths.name}"


def sweep_objects(paths: SweepPaths, spec: SweepSpec) -> dict[str, int]:
    """Return the sizes of a sweep's objects by key; empty without an object store.

    Raises:
        StoreUntrusted: The object store is not trusted.
        StoreUnusable: The object store does not answer.
    """
    prefix = objects_prefix(paths, spec)
    if prefix is None:
        return {}
    check_store(paths.directory, prefix)
    from trainable.storage.objects import object_sizes

    return object_sizes(prefix)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a directory that is no directory."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
            else:
                yield entry


def _kind(parts: tuple[str, ...]) -> str:
    first = parts[0]
    if first == "trials" and len(parts) > 2:
        return _OF_A_TRIAL.get(parts[2], "logs")
    if first.startswith("ledger.db"):  # also SQLite's journal
        return "ledger"
    return {"outbox": "outbox", "report.html": "report"}.get(first, "other")
