"""No module imports another one that imports it, directly or over others.

`lint-imports` compares packages and the modules beside them. This test reads the source of every
module, with the imports inside functions, and names the modules of a circle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("sweeps", "trainable", "tracking", "redaction", "tests")


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    sources = {_name(file): file.read_text() for file in files}
    assert len(sources) > 300
    assert _circle(sources) is None


@pytest.mark.parametrize(
    ("imported", "found"),
    [
        ("import house.cellar", True),
        ("from house.cellar import coal", True),
        ("from house import cellar", True),
        ("from . import cellar", True),
        ("from .cellar import coal", True),
        ("def climb():\n    from house import cellar", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.cellar", False),
        ("if TYPE_CHECKING:\n    import ast\nelse:\n    import house.cellar", True),
        ("import house_of_others.cellar", False),
    ],
)
def test_a_planted_circle_is_found(imported: str, found: bool) -> None:
    sources = {
        "house": "",
        "house.roof": imported,
        "house.stairs": "import house.roof",
        "house.cellar": "from house import stairs",
    }
    circle = _circle(sources)
    assert (circle is not None) is found
    if circle is not None:
        assert set(circle) == {"house.roof", "house.stairs", "house.cellar"}


def _circle(sources: Mapping[str, str]) -> list[str] | None:
    """Return the modules of a circle; None: there is none."""
    graph = {
        name: set(_imported(ast.parse(source), name, sources.keys())) & sources.keys() - {name}
        for name, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return None


def _imported(node: ast.AST, module: str, modules: Set[str]) -> Iterator[str]:
    """Yield the names that a module imports, those for a type checker alone left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _imported(ast.Module(child.orelse, []), module, modules)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                is_package = any(name.startswith(f"{module}.") for name in modules)
                up = child.level - is_package
                parts = module.split(".")[: -up or None]
                base = ".".join([*parts, *([base] if base else [])])
            for alias in child.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in modules else base
        else:
            yield from _imported(child, module, modules)


def _name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
