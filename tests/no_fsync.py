"""Databases without fsync, for tests in which processes die and no power fails.

What must not be tested with it: what is on the disk at which moment (`tests/chaos`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event


@pytest.fixture(scope="session", autouse=True)
def databases_without_fsync() -> Iterator[None]:
    """SQLite databases that this process opens are not synced."""

    def hasten(connection: Any, _: Any) -> None:
        if type(connection).__module__ == "sqlite3":
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", hasten)
    yield
    event.remove(Engine, "connect", hasten)
