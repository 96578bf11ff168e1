"""Fixtures of the tests that start real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.commandline import CommandLine
from tests.no_fsync import databases_without_fsync

__all__ = ["cli", "databases_without_fsync", "module_cli"]


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[CommandLine]:
    line = CommandLine(tmp_path)
    yield line
    line.end_all()


@pytest.fixture(scope="module")
def module_cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """One directory for all tests of a file."""
    line = CommandLine(tmp_path_factory.mktemp("cli"))
    yield line
    line.end_all()
