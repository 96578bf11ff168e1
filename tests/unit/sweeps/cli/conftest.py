"""A trained sweep for the commands that train a trial again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.paths import SweepPaths
from tests.unit.sweeps.trained_sweep import PRUNED, RESUMED, copy_of, trained


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished sweep; its second trial was pruned, its third one interrupted and resumed."""
    here, rates = tmp_path_factory.mktemp("template"), [1e-3, 3e-3, 3e-2]
    with trained(here, rates, pruned=[PRUNED], interrupted=[RESUMED]):
        yield here


@pytest.fixture
def paths(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepPaths:
    """A copy of it, in the working directory."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return copy_of(template, tmp_path / "here", monkeypatch)
