"""A sweep that records into its user's own PostgreSQL, with no server before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from tests.chaos.postgres import Cluster, own_cluster
from tests.chaos.tracking_service import read_store
from tests.integration.commandline import TINY, CommandLine

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with own_cluster() as made:
        yield made


def test_a_sweep_on_postgresql_and_after_an_upgrade_of_mlflow(
    cli: CommandLine, cluster: Cluster
) -> None:
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
