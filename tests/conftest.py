"""Fixtures of all tests: one Ray per session, a clean environment, limits that scale, and threads
that wait without spinning.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from tests.chaos.fault_table import FaultTable
from tests.seeds import SeedTable
from tests.time_limits import scaled

# Two processes of tests share the cores with all that they start. Threads of torch that spin while
# they wait take these cores from others: training with two threads takes five times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure(config: pytest.Config) -> None:
    """A session ends with the tables of what it ran: faults, and rows of the seed documents."""
    config.pluginmanager.register(FaultTable())
    config.pluginmanager.register(SeedTable())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell lets what it starts in the background ignore Ctrl-C, and so would every command
        # that is started from here.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tests see neither the user's sweeps nor the user's tracking server, and trust no store."""
    for name in ("SWEEP_ROOT", "MLFLOW_TRACKING_URI", "RAY_ADDRESS", "SWEEP_TRUSTED_STORES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(
        "XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / f"config-{uuid.uuid4().hex}")
    )


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know pytest-timeout's setting also where it is not installed: tests/gpu needs it not."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for each test, where pytest-timeout is installed")


def _given_timeout(config: pytest.Config) -> float:
    return float(config.getoption("timeout") or config.getini("timeout"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give each test more time on a loaded machine; pytest-timeout reads the limit after this."""
    if item.config.pluginmanager.hasplugin("timeout"):
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker else _given_timeout(item.config)
        item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)
    return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in tests/integration is an integration test."""
    for item in items:
        if "integration" in item.path.parts:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def ray_on_two_cores() -> Iterator[None]:
    """A real local Ray with two logical GPUs, shared by all tests of this process."""
    from sweeps.engine import local_ray
    from sweeps.engine.resources import Gpu, Machine

    before, token = dict(os.environ), uuid.uuid4().hex  # two sessions must not end each other's
    local_ray.configure(token)
    machine = Machine("test", cpus=8, memory=2**30, gpus=(Gpu("logical", 2**30),) * 2)
    local_ray.start(token, machine, concurrency=4)
    yield
    local_ray.stop(token)
    os.environ.clear()
    os.environ.update(before)
