"""`make env` compares packages with `.ci/hashes.txt` and refuses a replaced one.

The packages come from a directory, so that no package index is needed. What must not live here:
what our own file lists (`tests/unit/test_pinned_packages.py`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.slices import sliced
from tests.time_limits import scaled

ROOT = Path(__file__).parents[2]
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "project"
version = "1"
dependencies = ["needed"]
[dependency-groups]
dev = ["tool"]
"""
BACKEND = """
import shutil
def build_editable(directory, *_):
    return shutil.copy("project-1-py3-none-any.whl", directory).rpartition("/")[2]
"""


def _wheel(directory: Path, name: str, *needs: str, code: str = "") -> Path:
    """Write a wheel with one module."""
    path = directory / f"{name}-1-py3-none-any.whl"
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", code)
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
            + "".join(f"Requires-Dist: {need}\n" for need in needs),
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(
            f"{info}/RECORD",
            "".join(f"{file},,\n" for file in (*wheel.namelist(), f"{info}/RECORD")),
        )
    return path


class Checkout:
    """A project with our Makefile, an environment of its own, and a directory of packages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packages = path / "packages"
        for made in (self.packages, path / ".ci"):
            made.mkdir()
        shutil.copy(ROOT / "Makefile", path)
        (path / "pyproject.toml").write_text(PROJECT)
        (path / "backend.py").write_text(BACKEND)
        _wheel(path, "project", "needed")
        pins = {name: _wheel(self.packages, name).read_bytes() for name in ("needed", "tool")}
        (path / ".ci" / "hashes.txt").write_text(
            "".join(
                f"{name}==1 \\\n    --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"
                for name, content in pins.items()
            )
        )
        (path / ".ci" / "constraints.txt").write_text("needed==1\ntool==1\n")
        environment = path / ".venv"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", environment],
            check=True,
            timeout=scaled(60),
        )
        (environment / "bin" / "uv").symlink_to(Path(sys.executable).with_name("uv"))
        (self.modules,) = environment.glob("lib/python3*/site-packages")
        (self.modules / "pip.py").touch()  # uv is there already

    def make(self) -> subprocess.CompletedProcess[str]:
        settings = {
            "UV_NO_INDEX": "1",
            "UV_NO_CONFIG": "1",
            "UV_FIND_LINKS": str(self.packages),
            "UV_CACHE_DIR": str(self.path / "cache"),
        }
        return subprocess.run(
            ["make", "env"],
            cwd=self.path,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=False,
            timeout=scaled(120),
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_packages_with_matching_hashes_are_installed(checkout: Checkout) -> None:
    made = checkout.make()
    assert made.returncode == 0, made.stderr
    assert (checkout.modules / "needed.py").exists()
    assert (checkout.modules / "tool.py").exists()


@pytest.mark.parametrize("name", sliced(["needed", "tool"], "needed".__eq__))
def test_replaced_package_is_refused(checkout: Checkout, name: str) -> None:
    _wheel(checkout.packages, name, code="print('planted')")
    made = checkout.make()
    assert made.returncode != 0
    assert f"`{name}==1`" in made.stderr
    assert not (checkout.modules / f"{name}.py").exists()
    assert not (checkout.path / ".venv" / "ready").exists()
