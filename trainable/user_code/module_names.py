"""Find the user's modules that another module of the same name hides, without importing anything.

The working directory is the last entry of `sys.path` (`task_import.py`). If Python or an installed
package has a module of the same name, the user's file is never imported.
What must not live here: importing anything.
"""

from __future__ import annotations

import ast
import filecmp
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_OWN_PACKAGES = ("sweeps", "trainable", "tracking", "redaction")
_MOST_FILES = 1_000  # the most files of the user that are read


def hidden_by(name: str, directory: str) -> tuple[str, str] | None:
    """Return the file of a top-level name in a directory, and the module that hides it."""
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
    """Find the imports of a user's modules that another module of the same name hides."""
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
    """Return what an import finds outside a directory."""
    here = {"", directory, os.path.realpath(directory)}
    path = [entry for entry in sys.path if entry not in here]
    for finder in sys.meta_path:
        if finder is PathFinder:
            found = PathFinder.find_spec(name, path)
        else:  # the finder of an editable install
            found = finder.find_spec(name, None)
        if found is not None:
            return found
    return None


def _is_same(name: str, one: str, other: str) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    # An equal copy of this project's packages, such as their source checkout, does no harm.
    is_own = name in _OWN_PACKAGES and os.path.isfile(other)
    return is_own and filecmp.cmp(one, other, shallow=False)


def _files(name: str, directory: Path) -> Iterator[Path]:
    """Yield the files of a dotted name below a directory, with those of its packages."""
    path = directory
    for part in name.split("."):
        path = path / part
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                yield file


def _imports(file: Path, directory: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports; relative ones begin at the directory."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return  # importing the file reports the error
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
