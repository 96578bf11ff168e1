"""What the fault tests share: the storage's faults, compiled once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.faults import Faults, compile_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled `faults.c`. Without a compiler its tests are left out; in CI they fail."""
    try:
        return compile_shim(tmp_path_factory.mktemp("shim"))
    except FileNotFoundError as problem:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(problem))


@pytest.fixture
def faults(shim: Path, tmp_path: Path) -> Faults:
    """Faults of everything below `tmp_path / "runs"`, where sweeps lie by default."""
    return Faults(shim, tmp_path, tmp_path / "runs")
