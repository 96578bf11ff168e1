"""Names that a user's modules cannot have, found by reading the code, before anything is imported.

The working directory stands last in `sys.path` (`task_import`): a file in it whose name Python or
an installed package has already is never imported under that name. What must not live here:
importing anything.
"""

from __future__ import annotations

import ast
import filecmp
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

OURS = ("sweeps", "trainable", "tracking", "redaction")
_MOST_FILES = 1_000  # of the user's, that are read


def hidden_by(name: str, directory: str) -> tuple[str, str] | None:
    """Return the file that a top-level name has in a directory, and what has that name already.

    Returns:
        None where there is no such file, or nothing hides it.
    """
    own = PathFinder.find_spec(name, [directory])
    if own is None or own.origin is None:  # no file, or a directory without __init__.py
        return None
    if name in sys.stdlib_module_names or name == "__main__":
        return own.origin, "Python's own module"
    other = _elsewhere(name, directory)
    if other is None or other.origin is None or _is_same(name, own.origin, other.origin):
        return None
    return own.origin, other.origin


def hidden_imports(module: str, directory: str) -> Iterator[tuple[str, str, str, str]]:
    """Find what a user's modules import and cannot get from their own directory.

    Args:
        module: The first of them; those that it imports from the directory are read, too.
        directory: Where they lie.

    Yields:
        The file that imports, the top-level name, its file in the directory, and what has that
        name already.
    """
    seen: set[Path] = set()
    names: set[str] = set()
    waiting = [*_files(module, Path(directory))]
    while waiting and len(seen) < _MOST_FILES:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for name in _imports(file, Path(directory)):
            top = name.partition(".")[0]
            if top not in names:
                names.add(top)
                if hidden := hidden_by(top, directory):
                    yield str(file), top, *hidden
            waiting += _files(name, Path(directory))


def _elsewhere(name: str, directory: str) -> ModuleSpec | None:
    """What an import finds that does not look into a directory."""
    here = {"", directory, os.path.realpath(directory)}
    path = [entry for entry in sys.path if entry not in here]
    for finder in sys.meta_path:
        if finder is PathFinder:
            found = PathFinder.find_spec(name, path)
        else:  # a package that was installed to be edited lies on no path
            found = finder.find_spec(name, None)
        if found is not None:
            return found
    return None


def _is_same(name: str, one: str, other: str) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    # Another copy of ours, such as the checkout that it was installed from, does no harm.
    return name in OURS and os.path.isfile(other) and filecmp.cmp(one, other, shallow=False)


def _files(name: str, directory: Path) -> Iterator[Path]:
    """The files of a dotted name that lie below a directory, those of its packages included."""
    place = directory
    for part in name.split("."):
        place = place / part
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file


def _imports(file: Path, directory: Path) -> Iterator[str]:
    """The dotted names that a file imports, relative ones from the directory on."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return  # importing it says why
    package = file.relative_to(directory).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield one.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            for one in node.names:
                yield f"{base}.{one.name}" if base else one.name
