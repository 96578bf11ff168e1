"""`make docs`: what it refuses, and links to files of the repository.

What must not live here: the documents as they are, which `make check` builds.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.time_limits import scaled

ROOT = Path(__file__).parents[2]
_NOT_COPIED = {".git", ".venv", ".cache", "docs", "mkdocs.yml", "runs", "site", "sweeps"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project with pages and code that a test may change."""
    for path in ROOT.iterdir():
        if path.name not in _NOT_COPIED:
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "sweeps", tmp_path / "sweeps")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


def _build(project: Path) -> subprocess.CompletedProcess[str]:
    """Build the site with the options of `make docs`."""
    shown = subprocess.run(
        ["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (line,) = (line for line in shown.splitlines() if " -m mkdocs " in line)
    options = shlex.split(line.partition(" -m ")[2])
    return subprocess.run(
        [sys.executable, "-m", *options],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(120),
    )


def _html(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.chaos
def test_site_shows_files_as_text_and_searches_decisions_last(project: Path) -> None:
    (project / "docs/page.md").write_text("# Page\n\nSee [the step](../trainable/step.py).\n")
    done = _build(project)
    assert done.returncode == 0, done.stderr
    html = _html(project / "site/page.html")
    assert '<span title="trainable/step.py">the step</span>' in html
    index = json.loads((project / "site/search/search_index.json").read_text(encoding="utf-8"))
    weights = {
        entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in index["docs"]
    }
    assert weights["adr/index.html"] < weights["page.html"] == 1


@pytest.mark.chaos
def test_link_to_a_file_leads_to_the_repository(project: Path) -> None:
    (project / "docs/page.md").write_text("# Page\n\nSee [the step](../trainable/step.py).\n")
    with (project / "mkdocs.yml").open("a") as config:
        config.write("repo_url: https://code.example/gradsweep\n")
    done = _build(project)
    assert done.returncode == 0, done.stderr
    address = "https://code.example/gradsweep/blob/main/trainable/step.py"
    assert f'href="{address}"' in _html(project / "site/page.html")


UNDOCUMENTED = {
    "sweeps/errors.py": "Another process holds the sweep's lock or its ledger.",
    "sweeps/spec/sections.py": "Only a change by more than this counts as an improvement.",
}
BROKEN = ("none.md", "index.md#nowhere", "../trainable/none.py", "reference/spec.md#missing")


def test_broken_links_and_undocumented_public_names_fail(project: Path) -> None:
    """One build names all of them."""
    links = " ".join(f"[it]({link})" for link in BROKEN)
    (project / "docs/page.md").write_text(f"# Page\n\nSee {links}.\n")
    for file, docstring in UNDOCUMENTED.items():
        text = (project / file).read_text(encoding="utf-8")
        assert f'"""{docstring}"""\n' in text
        (project / file).write_text(text.replace(f'"""{docstring}"""\n', ""), encoding="utf-8")
    done = _build(project)
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    for link in BROKEN:
        assert any("page.md" in one and link.removeprefix("../") in one for one in warnings), link
    for name in ("sweeps.errors.", "the key "):
        assert any(name in one and "has no docstring" in one for one in warnings), name
