"""Fixtures of the fault matrix: a sandbox for each test, references shared by all, and the
storage's faults, compiled once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.faults import Faults, compile_shim
from tests.chaos.harness import SERIAL, References, Sandbox, Template

_SECONDS = 900  # several drivers, each with its own imports, on a machine that may be busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of faults more time than others."""
    for item in items:
        if item.get_closest_marker("fault") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SECONDS))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Sweeps that nothing interrupted; `references.of(SERIAL)` makes one when first asked."""
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture
def sandbox(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A directory for the serial sweep, or for the one whose spec is the parameter."""
    made = Sandbox(tmp_path / "sweep", getattr(request, "param", SERIAL))
    yield made
    made.close()


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    """The serial sweep as it was when the power went off in the middle of its third trial: one
    trial is complete, one was stopped early, one has checkpoints, the last does not exist yet.
    """
    sandbox = Sandbox(tmp_path_factory.mktemp("interrupted") / "sweep", SERIAL)
    driver, _ = sandbox.run_to("backward", 58)
    driver.power_off()
    yield Template(sandbox)
    sandbox.close()


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
