"""The documents: their links lead somewhere, their tests exist, their examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sweeps.cli import app
from sweeps.spec import parse_spec
from tests.chaos.fault_table import ROWS, find_tests

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / f"{n}.md" for n in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (ROOT / t).exists()]
    assert missing == []


def test_every_test_that_the_readme_names_exists() -> None:
    sources = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", README))
    assert named
    assert {name for name in named if f"def {name}(" not in sources} == set()
    paths = set(re.findall(r"`((?:tests|sweeps)/[\w/]+\.(?:py|yaml))`", README))
    assert paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_every_command_is_in_the_readme() -> None:
    commands = {
        command.name or command.callback.__name__.replace("_command", "")
        for command in app.registered_commands
        if command.callback is not None
    }
    missing = {c for c in commands if f"`{c}`" not in README and f"sweep {c}" not in README}
    assert missing == set()


def test_spec_in_the_readme_is_valid() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert parse_spec(block, "README.md").name == "digits"


@pytest.mark.parametrize(
    "example", sorted((ROOT / "sweeps/examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_example_is_valid(example: Path) -> None:
    parse_spec(example.read_text(encoding="utf-8"), example.name)


def test_table_of_what_survives_what_is_that_of_the_fault_matrix() -> None:
    """Each kind of fault stands in it once, with a test of that kind or the words that there is
    none.
    """
    section = README.partition("## What survives what")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", section, re.MULTILINE)
    assert [int(row) for row, _ in lines] == list(ROWS)
    tests = find_tests(ROOT / "tests")
    for row, shown in lines:
        there = set(tests.get(int(row), []))
        named = set(re.findall(r"`(test_row_\w+)`", shown))
        assert named <= there, f"row {row}: {named - there} are no tests of that fault"
        assert bool(named) != shown.startswith("not yet"), f"row {row}: {shown}"
        assert bool(named) == bool(there), f"row {row} has the tests {sorted(there)}"
