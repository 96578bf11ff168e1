"""Upload the user's code to a cluster's nodes, as Ray's `working_dir`.

The package is the working directory, if it contains the task's module. Ray excludes `.git`,
environments and the patterns of `.gitignore` and `.rayignore`. This module also excludes the
sweeps and files too large to be code. What must not live here: starting Ray (`cluster`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path

from sweeps.engine.cluster_address import ClusterRefused
from sweeps.engine.ray_compat.ray_internals import visit_uploaded
from sweeps.formatting import format_bytes

LARGE = 50 * 2**20
"""Files larger than this many bytes count as data and are not uploaded."""
LIMIT = 500 * 2**20
"""The maximum size of a package in bytes; Ray accepts 512 MiB."""
MOST_FILES = 20_000
_NEVER = (".git", ".venv", "venv", "__pycache__", "node_modules", ".*_cache", "*.pyc")
_SHOWN = 5
_SPECIAL = re.compile(r"([*?\[\]!#\\ ])")


@dataclass(frozen=True)
class CodePackage:
    """The code that is uploaded.

    Attributes:
        directory: The directory that is uploaded.
        excludes: The files there that are not uploaded, as patterns of `.gitignore`.
        left: The files that are too large to upload, with their sizes in bytes.
        size: The size of the uploaded files in bytes.
    """

    directory: Path
    excludes: tuple[str, ...]
    left: tuple[tuple[str, int], ...]
    size: int

    def warning(self) -> str | None:
        """Return a warning about files that are too large to upload; None if all are uploaded."""
        if not self.left:
            return None
        return (
            f"not uploaded, because larger than {format_bytes(LARGE)} each: {_named(self.left)}; "
            "put such files on storage that every node sees, and use absolute paths"
        )


def package_code(directory: Path, root: Path, modules: Iterable[str]) -> CodePackage | None:
    """Choose the files to upload.

    Args:
        directory: The working directory of the command.
        root: The directory of all sweeps, which every node sees already.
        modules: The modules that trials import.

    Returns:
        None if no module is in the directory; installed packages are not uploaded.

    Raises:
        ClusterRefused: The files are too large or too many, or a module is excluded.
    """
    names = [*modules]
    packages = {name.partition(".")[0] for name in names}
    if not any(PathFinder.find_spec(package, [str(directory)]) for package in packages):
        return None
    excludes = [*_NEVER]
    if root.is_relative_to(directory) and root != directory:
        excludes.append(_pattern(str(root.relative_to(directory))))
    sizes = _sizes(directory, excludes)
    for file in _sources(directory, names):
        if file not in sizes:
            raise ClusterRefused(
                f"{directory / file} is not uploaded to the cluster's nodes: .gitignore or "
                ".rayignore names it; the task's module must be uploaded; remove it from that "
                "file, or set RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1"
            )
    left = {name: size for name, size in sizes.items() if size > LARGE}
    small = {name: size for name, size in sizes.items() if size <= LARGE}
    total = sum(small.values())
    if total > LIMIT:
        raise ClusterRefused(
            f"{directory}: {format_bytes(total)} would be uploaded to the cluster's nodes; the "
            f"limit is {format_bytes(LIMIT)}; the largest are {_named(_entries(small))}; list "
            "what the task does not import in .rayignore, or move it elsewhere"
        )
    return CodePackage(
        directory,
        (*excludes, *map(_pattern, sorted(left))),
        tuple(sorted(left.items(), key=_by_size)),
        total,
    )


def _sources(directory: Path, modules: Iterable[str]) -> Iterator[str]:
    """Yield the source files of modules and of their parent packages, if in the directory."""
    for module in modules:
        for parts in accumulate(module.split("."), lambda above, name: f"{above}/{name}"):
            for file in (f"{parts}.py", f"{parts}/__init__.py"):
                if (directory / file).is_file():
                    yield file


def _sizes(directory: Path, excludes: list[str]) -> dict[str, int]:
    """Return the files that Ray would upload, by path, with their sizes in bytes."""
    sizes: dict[str, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[str(path.relative_to(directory))] = path.stat().st_size
        if len(sizes) > MOST_FILES:
            raise ClusterRefused(
                f"{directory}: more than {MOST_FILES:,} files would be uploaded to the cluster's "
                f"nodes; most are in {_named(_entries(dict.fromkeys(sizes, 1)), str)}; start "
                "the sweep in the directory of its code, or list the others in .rayignore"
            )

    visit_uploaded(directory, excludes, note)
    return sizes


def _entries(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """Return the total size of each entry of the top level, the largest first."""
    sums: dict[str, int] = {}
    for name, size in sizes.items():
        top, slash, _ = name.partition("/")
        sums[top + slash] = sums.get(top + slash, 0) + size
    return sorted(sums.items(), key=_by_size)


def _by_size(entry: tuple[str, int]) -> tuple[int, str]:
    return -entry[1], entry[0]


def _named(entries: Iterable[tuple[str, int]], form: object = None) -> str:
    say = str if form is str else format_bytes
    return ", ".join(f"{name} ({say(size)})" for name, size in [*entries][:_SHOWN])


def _pattern(path: str) -> str:
    """Return the pattern of `.gitignore` that matches one path below the directory."""
    return "/" + _SPECIAL.sub(r"\\\1", path)
