"""Fixtures of the tests that start few processes: what each process of tests makes once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.testing

from tests.no_fsync import databases_without_fsync

__all__ = ["databases_without_fsync"]


@pytest.fixture(scope="session", autouse=True)
def _command_line_built_once() -> Iterator[None]:
    """Typer's runner builds all commands for each line; a command of a user builds them once."""
    with pytest.MonkeyPatch.context() as patch:
        built = functools.cache(typer.testing._get_command)
        patch.setattr(typer.testing, "_get_command", built)
        yield
