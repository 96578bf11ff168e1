"""Fixtures of the fault matrix: a sandbox for each test, references shared by all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.harness import SERIAL, References, Sandbox, Template
from tests.chaos.postgres import INSTALL, Cluster, find_binaries
from tests.chaos.scripted_proxy import Proxy
from tests.chaos.tracking_service import Service


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
    """The serial sweep as it was when the power went off in the middle of its second trial: one
    trial has ended, one has checkpoints, the others do not exist yet.
    """
    sandbox = Sandbox(tmp_path_factory.mktemp("interrupted") / "sweep", SERIAL)
    driver, _ = sandbox.run_to("backward", 48)
    driver.power_off()
    yield Template(sandbox)
    sandbox.close()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A real tracking server on SQLite; it takes a quarter of a minute to come up."""
    directory = tmp_path_factory.mktemp("service")
    with Service(f"sqlite:///{directory}/mlflow.db", directory) as made:
        yield made


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL of these tests' own."""
    binaries = find_binaries()
    if binaries is None:
        assert not os.environ.get("CI"), f"PostgreSQL is missing: {INSTALL}"
        pytest.skip(f"PostgreSQL is not installed; get it with: {INSTALL}")
    with Cluster(binaries) as made:
        yield made


@pytest.fixture(scope="session")
def service_on_postgres(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A real tracking server on PostgreSQL."""
    with Service(cluster.uri, tmp_path_factory.mktemp("service-on-postgres")) as made:
        yield made


@pytest.fixture
def proxy(service: Service) -> Iterator[Proxy]:
    """A scripted proxy before the tracking server on SQLite."""
    with Proxy(service.url) as made:
        yield made
