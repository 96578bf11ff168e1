"""The documents: the tests that they name exist, and their tables and examples are right.

What must not live here: links (`test_document_links`), and code blocks, which
`tests/integration/test_document_blocks.py` runs.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from sweeps.spec.spec import parse_spec
from tests.chaos.fault_table import ROWS, find_tests, promised_tests
from trainable.config import TrainConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
HOLES_UNTIL = {"ray": "2.56", "mlflow": "3.11", "torch": "2.10"}
"""The first releases without the holes that are known of those before."""


def test_each_test_and_file_that_documents_name_exists() -> None:
    sources = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert named
    assert {name for name in named if f"def {name}(" not in sources} == set()
    paths = set(re.findall(r"`((?:tests|sweeps|trainable|tracking)/[\w/]+\.(?:py|yaml))`", TEXT))
    assert paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_each_attack_of_the_security_page_names_its_tests() -> None:
    page = (ROOT / "docs/concepts/security.md").read_text(encoding="utf-8")
    attacks = 0
    for table in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        lines = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
        header, rows = lines[0], lines[2:]
        if "Test" in header:
            for row in rows:
                assert len(row) == len(header), row
                assert re.fullmatch(r"(`test_\w+`(, )?)+", row[header.index("Test")]), row
            attacks += len(rows)
    assert attacks > 50


def test_keys_in_the_documents_have_these_defaults() -> None:
    lines = re.findall(r"^\| `train\.([\w.]+)` \| `(\w+)` \|", TEXT, re.MULTILINE)
    assert len(lines) >= 10
    defaults = TrainConfig()
    for key, shown in lines:
        assert yaml.safe_load(shown) == functools.reduce(getattr, key.split("."), defaults), key


@pytest.mark.parametrize(
    "example", sorted((ROOT / "sweeps/examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_example_is_valid(example: Path) -> None:
    parse_spec(example.read_text(encoding="utf-8"), example.name)


def test_survival_table_equals_the_fault_matrix() -> None:
    """Each kind of fault stands in it once, with tests of that kind or the words that there are
    none.
    """
    lines = re.findall(r"^\| (\d+) \|.*\| (`test_row_.*|not yet.*) \|$", TEXT, re.MULTILINE)
    assert [int(row) for row, _ in lines] == list(ROWS)
    tests, promised = find_tests(ROOT / "tests"), promised_tests(TEXT)
    for row, shown in lines:
        there = set(tests.get(int(row), []))
        named = set(promised.get(int(row), []))
        assert named <= there, f"row {row}: {named - there} are no tests of that fault"
        assert bool(named) != shown.startswith("not yet"), f"row {row}: {shown}"
        assert bool(named) == bool(there), f"row {row} has the tests {sorted(there)}"


def test_no_required_version_has_a_known_vulnerability() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = [
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
    ]
    asked = [Requirement(line) for group in groups for line in group]
    asked = [one for one in asked if one.name in HOLES_UNTIL]
    assert {one.name for one in asked} == set(HOLES_UNTIL)
    for one in asked:
        oldest = max(Version(s.version) for s in one.specifier if s.operator == ">=")
        assert oldest >= Version(HOLES_UNTIL[one.name]), str(one)
