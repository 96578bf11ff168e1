"""Fixtures of the fault matrix: a sandbox for each test, references shared by all, and the
storage's faults, compiled once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.engine import Engine, own_or_running
from tests.chaos.faults import Faults, compile_shim
from tests.chaos.invariants import SERIAL, References, Sandbox, Template
from tests.chaos.postgres import Cluster, own_cluster
from tests.chaos.scripted_proxy import Proxy
from tests.chaos.tracking_service import Service

_SECONDS = 900  # several drivers, each with its own imports, on a machine that may be busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of faults more time than others."""
    for item in items:
        if item.get_closest_marker("fault") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SECONDS))


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker engine, whose cache of builds is shared by all tests of containers."""
    with own_or_running() as made:
        yield made


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Sweeps that nothing interrupted; `references.of(SERIAL)` makes one when first asked."""
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "references"
    directory.mkdir(exist_ok=True)
    return References(directory)


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


@pytest.fixture(scope="session")
def service_on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A real tracking server on SQLite; it takes a quarter of a minute to come up."""
    directory = tmp_path_factory.mktemp("service")
    with Service(f"sqlite:///{directory}/mlflow.db", directory) as made:
        yield made


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL of these tests' own."""
    with own_cluster() as made:
        yield made


@pytest.fixture(scope="session")
def service_on_postgres(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A real tracking server on PostgreSQL."""
    with Service(cluster.uri, tmp_path_factory.mktemp("service-on-postgres")) as made:
        yield made


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Service:
    """The tracking server on SQLite, or the one whose fixture is the parameter."""
    found: Service = request.getfixturevalue(getattr(request, "param", "service_on_sqlite"))
    return found


@pytest.fixture
def proxy(service: Service) -> Iterator[Proxy]:
    """A scripted proxy before the tracking server."""
    with Proxy(service.url) as made:
        yield made
