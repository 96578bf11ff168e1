"""What of a user's project travels to a cluster's nodes: the directory in which the task's module
lies, as Ray's `working_dir`.

Ray leaves out what `.gitignore` and `.rayignore` name, `.git` and environments; here the sweeps
themselves are added, and files too large to be code. What must not live here: Ray's own start.
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
"""Bytes from which on a file is data rather than code, and stays."""
LIMIT = 500 * 2**20
"""Bytes that may travel; Ray takes 512 MiB in one piece."""
MOST_FILES = 20_000
_NEVER = (".git", ".venv", "venv", "__pycache__", "node_modules", ".*_cache", "*.pyc")
_SHOWN = 5
_SPECIAL = re.compile(r"([*?\[\]!#\\ ])")


@dataclass(frozen=True)
class CodePackage:
    """What travels.

    Attributes:
        directory: Where it lies.
        excludes: What of it stays, as patterns of `.gitignore`.
        left: The files that are too large, with their sizes in bytes.
        size: What remains, in bytes.
    """

    directory: Path
    excludes: tuple[str, ...]
    left: tuple[tuple[str, int], ...]
    size: int

    def told(self) -> str | None:
        """What a user should know of it in a sentence; None when all of it travels."""
        if not self.left:
            return None
        return (
            f"stays here, being larger than {format_bytes(LARGE)} each: {_named(self.left)}; "
            "tasks read such files from a place that every node sees, by its absolute path"
        )


def package_code(directory: Path, root: Path, modules: Iterable[str]) -> CodePackage | None:
    """Choose what travels.

    Args:
        directory: Where the command was typed.
        root: Where the sweeps lie, which every node sees anyway.
        modules: What trials import, by name.

    Returns:
        None when no module lies there: installed packages are the nodes' own affair.

    Raises:
        ClusterRefused: It is too much.
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
                f"{directory / file} does not travel to the cluster's nodes; what .gitignore or "
                ".rayignore names stays here, and the task is imported from it; take it out of "
                "there, or set RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1"
            )
    left = {name: size for name, size in sizes.items() if size > LARGE}
    small = {name: size for name, size in sizes.items() if size <= LARGE}
    total = sum(small.values())
    if total > LIMIT:
        raise ClusterRefused(
            f"{directory}: {format_bytes(total)} would travel to the cluster's nodes; at most "
            f"{format_bytes(LIMIT)} can; the largest are {_named(_entries(small))}; name what the "
            "task does not import in .rayignore, or keep it elsewhere"
        )
    return CodePackage(
        directory,
        (*excludes, *map(_pattern, sorted(left))),
        tuple(sorted(left.items(), key=_by_size)),
        total,
    )


def _sources(directory: Path, modules: Iterable[str]) -> Iterator[str]:
    """Yield the files below the directory of which modules, and the packages above them, are."""
    for module in modules:
        for parts in accumulate(module.split("."), lambda above, name: f"{above}/{name}"):
            for file in (f"{parts}.py", f"{parts}/__init__.py"):
                if (directory / file).is_file():
                    yield file


def _sizes(directory: Path, excludes: list[str]) -> dict[str, int]:
    """The files that Ray would send, by path, with their sizes; Ray is asked for them."""
    sizes: dict[str, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[str(path.relative_to(directory))] = path.stat().st_size
        if len(sizes) > MOST_FILES:
            raise ClusterRefused(
                f"{directory}: more than {MOST_FILES:,} files would travel to the cluster's "
                f"nodes; the most are in {_named(_entries(dict.fromkeys(sizes, 1)), str)}; start "
                "the sweep in the directory of its code, or name the others in .rayignore"
            )

    visit_uploaded(directory, excludes, note)
    return sizes


def _entries(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """What each entry of the top level comes to, the largest first."""
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
    """The pattern that matches one path below the directory."""
    return "/" + _SPECIAL.sub(r"\\\1", path)
