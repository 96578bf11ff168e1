"""The security page names a test for each attack, and each test that it names exists.

What must not live here: whether the attacks fail, which those tests show.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "security.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def _attacks() -> Iterator[tuple[str, str]]:
    """The first and the last cell of each row of a table whose last column is `Test`."""
    for table in re.findall(r"(?:^\|.*\|\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        header, _, *rows = ([c.strip() for c in r.split(" | ")] for r in table.splitlines())
        if header[-1] == "Test |":
            for row in rows:
                assert len(row) == len(header), row
                yield row[0], row[-1]


def _functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_attack_names_its_tests() -> None:
    attacks = list(_attacks())
    assert attacks
    others = {attack for attack, tests in attacks if re.sub(_TEST, "", tests).strip(" ,|")}
    assert others == set()
    assert [attack for attack, tests in attacks if not _TEST.search(tests)] == []


def test_each_named_test_exists() -> None:
    named = set(_TEST.findall(PAGE.read_text(encoding="utf-8")))
    files = {file for file, _ in named}
    there = {file: _functions(file) for file in files if (ROOT / file).is_file()}
    assert {(f, name) for f, name in named if name not in there.get(f, set())} == set()
