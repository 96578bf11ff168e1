"""A sweep with its ledger in PostgreSQL: kills, resumes, a second driver, and database outages.
The result equals that of a sweep with a SQLite ledger.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.ledger.postgres import WAIT_SECONDS, LedgerDatabase
from tests.chaos.invariants import (
    SERIAL,
    Driver,
    References,
    Sandbox,
    assert_all,
    assert_ended,
    assert_prints_resume_command,
)
from tests.chaos.postgres import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture
def uri(cluster: Cluster) -> str:
    return cluster.create_database(f"sweeps_{uuid.uuid4().hex[:8]}")


@pytest.fixture
def shared(tmp_path: Path, uri: str) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "sweep", f'{SERIAL}storage: {{ledger: "{uri}"}}\n')
    yield made
    made.close()


def test_killed_driver_resumes_and_second_is_refused(
    references: References, shared: Sandbox, uri: str
) -> None:
    driver, _ = shared.run_to("backward", 58)
    elsewhere = shared.directory / "elsewhere"
    held = rf"'chaos' is already being run by process {driver.pid} on {socket.gethostname()};"
    assert_ended(shared.run("--root", str(elsewhere)).wait(), 4, held)
    assert_ended(shared.resume().wait(), 4, held)
    assert shared.cli.json("status", "chaos")["state"] == "running"
    driver.power_off()
    assert shared.cli.json("status", "chaos")["state"] == "interrupted"
    taken = rf"holds a sweep 'chaos' of \d trials already, whose files are at .*:{shared.cli.root}"
    assert_ended(shared.run("--root", str(elsewhere)).wait(), 2, taken)
    moved = r"storage\.ledger is postgresql.* and cannot become null: .*; leave it out"
    assert_ended(shared.resume("-s", "storage.ledger=null").wait(), 2, moved)
    assert not elsewhere.exists()
    assert_all(shared, references.of(SERIAL), shared.resume_to_end())
    assert not shared.paths.ledger.exists()
    assert LedgerDatabase(uri, "chaos", shared.paths.directory).holder() is None


def test_short_database_restart_is_waited_for(
    references: References, shared: Sandbox, cluster: Cluster, uri: str
) -> None:
    driver, _ = shared.run_to("forward", 20)
    cluster.stop()
    shared.probe.release("forward-20")
    _wait(driver, 3.0)
    cluster.start()
    place = LedgerDatabase(uri, "chaos", shared.paths.directory)
    driver.until(lambda: place.holder() is not None)  # it holds its lock again
    assert_all(shared, references.of(SERIAL), driver.wait())


def test_unavailable_database_stops_sweep_without_loss(
    references: References, shared: Sandbox, cluster: Cluster
) -> None:
    driver, _ = shared.run_to("forward", 20)
    cluster.stop()
    try:
        shared.probe.release("forward-20")
        ended = driver.wait(3 * WAIT_SECONDS)
        cause = r"stopped: the ledger of sweep 'chaos' in postgresql.* cannot be used: .*untouched"
        assert_prints_resume_command(ended, 3, cause)
        away = r"^the ledger of sweep 'chaos' in postgresql.* cannot be used: .*; start the datab"
        assert_ended(shared.resume().wait(), 2, away)
    finally:
        cluster.start()
    assert_all(shared, references.of(SERIAL), shared.resume_to_end())


def _wait(driver: Driver, seconds: float) -> None:
    until = time.monotonic() + seconds
    driver.until(lambda: time.monotonic() >= until)
