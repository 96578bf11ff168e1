"""The documents: their links lead somewhere, their tests exist, their examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sweeps.cli import app
from sweeps.spec import parse_spec

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
