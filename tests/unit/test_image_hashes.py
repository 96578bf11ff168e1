"""The image's recipe installs packages by version, and by hash where possible.

The recipe's commands run below a directory, with a pip and a uv that keep what they are given.
What must not live here: the build itself (`tests/chaos/test_containers.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "docker" / "Dockerfile"
TOOL = """#!/bin/sh
last=
for word; do
  case "$last $word" in "--constraint "*.txt|"--requirement "*.txt) cat "$word" >> "$GIVEN";; esac
  last=$word
done
"""
# In place of `python3 -m venv [--without-pip] DIRECTORY`.
PYTHON = """#!/bin/sh
for word; do :; done
mkdir -p "$word/bin"
for name in python uv; do cp "$TOOL" "$word/bin/$name"; done
"""
OF_A_BACKEND = {"torch", "torchvision", "triton"}


def _commands(installs: str) -> str:
    """The commands of the one RUN with these words, without its mounts."""
    recipe = re.sub(r"^#.*\n", "", RECIPE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    runs = re.findall(r"^RUN ((?:.*\\\n)*.*)", recipe, re.MULTILINE)
    (found,) = (run for run in runs if installs in run)
    return re.sub(r"--mount=\S+\s+(\\\n\s*)?", "", found)


class Build:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.requirements = directory / "requirements"
        for name in ("requirements", "commands", "tmp", "tools/bin"):
            (directory / name).mkdir(parents=True)
        for name in ("constraints.txt", "hashes.txt"):
            shutil.copy(ROOT / ".ci" / name, self.requirements)
        for file, content in (
            ("commands/python3", PYTHON),
            ("commands/tool", TOOL),
            ("tools/bin/uv", TOOL),
        ):
            (directory / file).write_text(content)
            (directory / file).chmod(0o755)

    def run(self, commands: str, backend: str = "") -> dict[str, bool]:
        """Run them; for each package that pip or uv is told the version of, whether by hash."""
        moved = re.sub(
            r"(?<![\w.$/-])/(requirements|tools|opt|source|tmp)(?=/)",
            rf"{self._directory}/\1",
            re.sub(r"(/requirements|/tools|/opt/gradsweep)(?=[; ])", r"\1/", commands),
        )
        given = self._directory / "given"
        settings = {
            "PATH": f"{self._directory}/commands:{os.environ['PATH']}",
            "GIVEN": str(given),
            "TOOL": str(self._directory / "commands" / "tool"),
            "TORCH_BACKEND": backend,
        }
        subprocess.run(["sh", "-c", moved], env=os.environ | settings, check=True, timeout=30)
        assert list((self._directory / "tmp").iterdir()) == []  # it would stay in the image
        pins: dict[str, bool] = {}
        for line in given.read_text().replace("\\\n", " ").splitlines():
            name = line.partition("==")[0]
            pins[name] = pins.get(name, False) or "--hash=sha256:" in line
        return pins


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


def _all() -> set[str]:
    lines = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[0] for line in lines}


def test_installers_are_installed_by_hash(build: Build) -> None:
    assert build.run(_commands("-m pip install")) == {"uv": True, "setuptools": True}


def test_packages_are_installed_by_hash(build: Build) -> None:
    assert build.run(_commands("--extra server")) == dict.fromkeys(_all(), True)


def test_with_a_backend_all_but_torch_are_installed_by_hash(build: Build) -> None:
    assert build.run(_commands("--extra server"), backend="cpu") == {
        name: name not in OF_A_BACKEND for name in _all()
    }


def test_custom_wheels_are_installed_by_version(build: Build) -> None:
    (build.requirements / "any.whl").touch()
    assert build.run(_commands("--extra server")) == dict.fromkeys(_all(), False)


def test_custom_tools_are_installed_by_version(build: Build) -> None:
    (build.requirements / "any.whl").touch()
    assert build.run(_commands("-m pip install")) == {"uv": False, "setuptools": False}
