"""Shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.postgres import Cluster, own_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL of these tests' own."""
    with own_cluster() as made:
        yield made
