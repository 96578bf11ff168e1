"""Measure how much space the files of a sweep take, by kind; symbolic links are not followed.

What must not live here: removing files (`run.removal`), and tables (`cli.render`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from sweeps.paths import REMOVED, SweepPaths, artifact_root, list_sweeps
from sweeps.spec.revisions import read_spec
from sweeps.spec.spec import SweepSpec
from sweeps.store_access import check_store
from sweeps.view.sweep_view import UnknownSweep

KINDS = ("checkpoints", "logs", "ledger", "outbox", "report", "other")
"""What takes space in a sweep's directory."""
_NUM_THREADS = 16
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


def sweep_usage(paths: SweepPaths, *, with_objects: bool = True) -> dict[str, Any]:
    """Return the object that `sweep du NAME --json` prints: a sweep's bytes by kind."""
    if not paths.exists():
        raise UnknownSweep(paths.name, paths.root)
    address, num_bytes = None, 0
    if with_objects:
        spec = read_spec(paths.spec).spec
        address = objects_prefix(paths, spec)
        num_bytes = sum(sweep_objects(paths, spec).values())
    sizes = directory_usage(paths.directory).sizes
    sizes["checkpoints"] += num_bytes
    return {
        "name": paths.name,
        **sizes,
        "total": sum(sizes.values()),
        "object_store": address,
    }


def total_usage(root: Path, warn: Callable[[str], None]) -> dict[str, Any]:
    """Return the object that `sweep du --json` prints: all sweeps, the largest first."""

    def measure(paths: SweepPaths) -> dict[str, Any]:
        try:
            return sweep_usage(paths)
        except ValueError as error:  # the spec or the object store
            warn(str(error))
            return sweep_usage(paths, with_objects=False)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # object stores answer slowly
        sweeps = sorted(pool.map(measure, list_sweeps(root)), key=lambda one: -one["total"])
    more = root_usage(root)
    total = sum(one["total"] for one in sweeps) + sum(more.values())
    return {"sweeps": sweeps, **more, "total": total}


def root_usage(root: Path) -> dict[str, int]:
    """Return the bytes below a root that belong to no sweep.

    `tracking` is the embedded tracking store, and `removed` the rest of interrupted removals.
    """
    places = root.glob("mlflow.db*"), [artifact_root(root)]
    tracking = sum(tree_size(path) for group in places for path in group)
    return {"tracking": tracking, "removed": tree_size(root / REMOVED)}


def objects_prefix(paths: SweepPaths, spec: SweepSpec) -> str | None:
    """Return the prefix of all objects of a sweep, `s3://...`; None without an object store."""
    prefix = spec.storage.checkpoints
    return None if prefix is None else f"{prefix}/{paths.name}"


def sweep_objects(paths: SweepPaths, spec: SweepSpec) -> dict[str, int]:
    """Return the sizes of a sweep's objects by key; empty without an object store."""
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
