"""Fixtures of the fault matrix: a sandbox for each test, references shared by all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness import SERIAL, References, Sandbox, Template


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Sweeps that nothing interrupted; `references.of(SERIAL)` makes one when first asked."""
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    """A directory for the serial sweep."""
    made = Sandbox(tmp_path / "sweep", SERIAL)
    yield made
    made.close()


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    """The serial sweep as it was when the power went off in the middle of its second trial: one
    trial has ended, one has checkpoints, the others do not exist yet.
    """
    sandbox = Sandbox(tmp_path_factory.mktemp("interrupted") / "sweep", SERIAL)
    driver, _ = sandbox.run_to("backward", 48)
    driver.power_off()
    yield Template(sandbox)
    sandbox.close()
