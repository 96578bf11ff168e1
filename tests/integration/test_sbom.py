"""`make sbom` and `make audit`: the installed packages as CycloneDX, and their look-up.

What must not live here: the database of known holes, which is on the network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest

from tests.time_limits import scaled

ROOT = Path(__file__).parents[2]
_TOOLS = Path(sys.executable).parent
_NO_TOOL = "cyclonedx-bom cannot be fetched; with a package index: uv tool run cyclonedx-bom"


def _make(target: str, sbom: Path, tools: Path = _TOOLS) -> subprocess.CompletedProcess[str]:
    """Run a target in this environment, as it is: an environment out of date is not made again."""
    words = ["make", "--old-file=.venv/ready", target, f"BIN={tools}", f"SBOM={sbom}"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=scaled(250)
    )


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def sbom_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sbom") / "sbom.json"
    made = _make("sbom", file)
    if re.search(r"Failed to fetch|not found in the package registry|No solution", made.stderr):
        if os.environ.get("CI") == "true":
            pytest.fail(f"{_NO_TOOL}\n{made.stderr}")
        pytest.skip(_NO_TOOL)
    assert made.returncode == 0, made.stderr
    return file


@pytest.fixture(scope="module")
def sbom(sbom_file: Path) -> Any:
    return json.loads(sbom_file.read_text(encoding="utf-8"))


def test_sbom_is_cyclonedx_and_names_this_project(sbom: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sbom["bomFormat"] == "CycloneDX"
    subject = sbom["metadata"]["component"]
    assert (subject["name"], subject["version"]) == (project["name"], project["version"])


def test_sbom_lists_each_installed_package_with_version(sbom: Any) -> None:
    installed = {
        (_name(one.name), one.version)
        for one in distributions(path=[get_path("purelib")])  # not what Ray brings along
        if one.name != "gradsweep"
    }
    listed = {(_name(one["name"]), one["version"]) for one in sbom["components"]}
    assert listed == installed
    assert all(one["purl"].startswith("pkg:pypi/") for one in sbom["components"])


def test_sbom_lists_dependencies(sbom: Any) -> None:
    subject = sbom["metadata"]["component"]["bom-ref"]
    needs = {one["ref"]: one.get("dependsOn", []) for one in sbom["dependencies"]}
    direct = {_name(ref.partition("==")[0]) for ref in needs[subject]}
    assert {"torch", "ray", "optuna", "mlflow"} <= direct
    reached, left = set(), [subject]
    while left:
        if (ref := left.pop()) not in reached:
            reached.add(ref)
            left += needs[ref]
    assert len(reached) > len(direct) + 1


def test_audit_looks_up_each_component(sbom: Any, sbom_file: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    asked = tmp_path / "asked"
    (tools / "python").symlink_to(sys.executable)
    (
        tools / "uv"
    ).write_text(  # in place of both tools: the SBOM is there, the audit keeps its input
        f'#!/bin/sh\ncase "$*" in *pip-audit*) exec cat > "{asked}";; esac\n'
        f'exec cp "{sbom_file}" "{tmp_path / "sbom.json"}"\n'
    )
    (tools / "uv").chmod(0o755)
    made = _make("audit", tmp_path / "sbom.json", tools)
    assert made.returncode == 0, made.stderr
    assert sorted(asked.read_text().splitlines()) == sorted(
        f"{one['name']}=={one['version'].partition('+')[0]}" for one in sbom["components"]
    )


def test_audit_fails_if_the_sbom_cannot_be_read(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    (tools / "uv").symlink_to(shutil.which("true") or "/bin/true")
    (tmp_path / "sbom.json").write_text("{}")
    assert _make("audit", tmp_path / "sbom.json", tools).returncode != 0


def test_git_ignores_the_sbom() -> None:
    assert "sbom.json" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
