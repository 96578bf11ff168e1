"""Fixtures of the tests that start real processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
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


@pytest.fixture(scope="session")
def _empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tracking store without runs. MLflow takes a second to create one, or several if busy."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    program = "import sys; from tracking.mlflow_server import connect; connect(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, f"sqlite:///{path}"], check=True)
    return path


def _copy_store(store: Path, line: CommandLine) -> None:
    line.root.mkdir()
    shutil.copy(store, line.root)


@pytest.fixture
def store(cli: CommandLine, _empty_store: Path) -> None:
    """For tests about something else: `cli` has a tracking store before its first sweep."""
    _copy_store(_empty_store, cli)


@pytest.fixture(scope="module")
def module_store(module_cli: CommandLine, _empty_store: Path) -> None:
    """As `store`, for `module_cli`."""
    _copy_store(_empty_store, module_cli)
