"""Only the command line prints; every other package returns what is to be said, or hands it on."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRINTING = ("cli", "entry.py", "examples")
"""The parts of `sweeps` that print, and what users write themselves."""


def test_only_the_command_line_prints() -> None:
    files = [
        file
        for file in (ROOT / "sweeps").rglob("*.py")
        if file.relative_to(ROOT / "sweeps").parts[0] not in PRINTING
    ]
    assert len(files) > 90
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and _prints(node.func)
    ]
    assert found == []


def _prints(called: ast.expr) -> bool:
    """Whether this is `print`, or a console's `print`."""
    if isinstance(called, ast.Attribute):
        return called.attr == "print"
    return isinstance(called, ast.Name) and called.id == "print"
