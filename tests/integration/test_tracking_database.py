"""A sweep that records directly into the user's PostgreSQL."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from redaction.secrets import redact
from tests.chaos.postgres import Cluster, own_cluster
from tests.chaos.tracking_service import read_store
from tests.integration.commandline import TINY, CommandLine
from tests.time_limits import scaled
from tracking.probe import TrackingUnusable, probe

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with own_cluster() as made:
        yield made


@pytest.mark.chaos
def test_sweep_on_postgresql_and_after_mlflow_upgrade(cli: CommandLine, cluster: Cluster) -> None:
    cli.write("tiny.yaml", TINY)
    assert "@" in cluster.uri, "a user without a password"
    cli.ok("run", "tiny.yaml", "--tracking-uri", cluster.uri)
    cli.ok("sync", "small")  # making the tables takes long on a busy machine
    runs = {run.tags["mlflow.runName"]: run for run in read_store(cluster.uri)}
    assert sorted(runs) == ["small", "trial-0000", "trial-0001"]
    assert {run.status for run in runs.values()} == {"FINISHED"}
    # A database holds no files: they lie where those of the embedded store do.
    assert not (cli.directory / "mlruns").exists()
    artifacts = cli.root / "mlartifacts" / "small" / runs["small"].run_id / "artifacts"
    assert Path(artifacts, "best/model.safetensors").exists()

    engine = create_engine(cluster.uri, poolclass=NullPool)
    with engine.begin() as db:
        db.execute(text("UPDATE alembic_version SET version_num = '451aebb31d03'"))
    done = cli("resume", "small", "-s", "trials=3")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "run: mlflow db upgrade 'postgresql+psycopg2://" in done.stderr
    assert len(cli.json("trials", "small")) == 2


def test_wrong_database_password_ends_run_before_it_starts(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_cluster(password="right") as guarded:
        monkeypatch.setenv("PGPASSWORD", "right")
        probe(guarded.uri)
        monkeypatch.setenv("PGPASSWORD", "hunter2")
        assert_refused(cli, guarded.uri, 'password authentication failed for user "gradsweep"')
        host = guarded.uri.partition("?host=")[2]
        several = guarded.uri.replace(host, f"127.0.0.1:1&host={host}:5432")  # nobody at the first
        with pytest.raises(TrackingUnusable, match="password authentication failed for user"):
            probe(several)
        assert not guarded.query("SELECT 1 FROM pg_tables WHERE schemaname = 'public'")


@pytest.mark.chaos
def test_unreachable_database_ends_run_before_it_starts(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        place = f"127.0.0.1:{bound.getsockname()[1]}"
        assert_refused(cli, f"postgresql+psycopg2://ada@{place}/mlflow", "Connection refused")


def assert_refused(cli: CommandLine, uri: str, cause: str) -> None:
    """One line has the address, the cause and the remedy, and the exit code is 2; nothing is made,
    asking takes less than five seconds, and the task, which takes longer, is not waited for.
    """
    started = time.monotonic()
    with pytest.raises(TrackingUnusable):
        probe(uri)
    assert time.monotonic() - started < scaled(5)

    cli.write("tiny.yaml", TINY)
    cli.write("slow.py", "import time\ntime.sleep(600)\n")
    cli.environment["PGPASSWORD"] = os.environ["PGPASSWORD"]
    done = cli("run", "tiny.yaml", "--tracking-uri", uri, "-s", "task=slow:Task")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    shown = redact(uri)
    assert line.startswith(f"--tracking-uri {shown}: tracking.uri: {shown} cannot be opened (")
    assert cause in line
    assert "); start the database, correct tracking.uri; PostgreSQL reads PGUSER, PGPASS" in line
    assert line.endswith(", or run with --offline and deliver later with `sweep sync`")
    assert "hunter2" not in line
    assert not cli.root.exists()
