"""`sweep list --remove` frees its objects in a store and its runs in MLflow, and no others."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.paths import artifact_root, tracking_uri
from tests.object_store import BUCKET, ObjectStore, named_by_environment
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.delivery import TAG_ROLE, TAG_SWEEP, TAG_TRIAL
from tracking.mlflow_server import MlflowServer
from trainable.store import objects

PREFIX = f"s3://{BUCKET}/team"
STORED = f"storage: {{checkpoints: '{PREFIX}'}}"
KILLED = """
import os, signal
from sweeps.cli.app import app
from trainable.store import objects
def remove_one(prefix):
    first = min(objects.object_sizes(prefix))
    objects.connect().fs.delete_file(first)
    os.kill(os.getpid(), signal.SIGKILL)
objects.remove_objects = remove_one
app()
"""
"""`sweep`, killed when it has removed one object of several."""


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with (
        ObjectStore() as made,
        named_by_environment(made),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SWEEP_TRUSTED_STORES", PREFIX)
        patch.setattr(objects, "_ATTEMPTS", 1)
        yield made


@pytest.fixture
def store(server: ObjectStore) -> Iterator[ObjectStore]:
    yield server
    if server.wire.is_cut.is_set():
        server.wire.mend()
    server.empty()


def _stored(root: Path, name: str) -> tuple[MadeSweep, list[str]]:
    """A sweep with checkpoints in the object store, and their keys."""
    made = MadeSweep(root, name, more=STORED)
    keys = []
    for value in (0.5, 0.4):
        number = made.add("complete", value)
        made.paths.trial(number).mkdir(parents=True)
        key = f"{BUCKET}/team/{name}/trials/{number:04d}/checkpoints/step-00000010-a/state.pt"
        objects.connect().pipe_file(key, bytes(1000))
        keys.append(key.removeprefix(f"{BUCKET}/"))
    return made, keys


def _rm(root: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["list", "--remove", *words, "--yes", "--root", str(root)])


def test_objects_of_the_sweep_are_removed_alone(store: ObjectStore, tmp_path: Path) -> None:
    _stored(tmp_path, "small")
    _, kept = _stored(tmp_path, "small2")
    done = _rm(tmp_path, "small")
    assert done.exit_code == 0, done.stderr
    assert "2 objects, 1.953 KiB, in the object store" in done.stdout
    assert store.objects() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["small2"]


@pytest.mark.chaos
def test_objects_count_as_checkpoints(store: ObjectStore, tmp_path: Path) -> None:
    _stored(tmp_path, "small")
    done = CliRunner().invoke(app, ["list", "small", "--sizes", "--root", str(tmp_path), "--json"])
    found = json.loads(done.stdout)
    assert (found["checkpoints"], found["object_store"]) == (2000, f"{PREFIX}/small")
    store.wire.cut()
    done = CliRunner().invoke(app, ["list", "--sizes", "--root", str(tmp_path), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["sweeps"][0]["checkpoints"] == 0
    assert f"{PREFIX}/small cannot be listed: " in done.stderr


def test_killed_removal_of_objects_is_completed(store: ObjectStore, tmp_path: Path) -> None:
    made, keys = _stored(tmp_path, "small")
    words = ["list", "small", "--remove", "--yes", "--root", str(tmp_path)]
    child = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
    assert child.returncode == -signal.SIGKILL
    assert store.objects() == keys[1:]
    assert not made.paths.exists()
    assert CliRunner().invoke(app, ["list", "--root", str(tmp_path), "--json"]).stdout == "[]\n"
    done = _rm(tmp_path, "small")
    assert done.exit_code == 0, done.stderr
    assert not store.objects()
    assert not list(tmp_path.iterdir())


@pytest.mark.chaos
def test_objects_of_a_later_sweep_of_the_name_stay(store: ObjectStore, tmp_path: Path) -> None:
    """The rest of a removal whose objects were gone must not take those of a new sweep."""
    made, keys = _stored(tmp_path, "small")
    made.paths.removed.root.mkdir()
    made.paths.directory.rename(made.paths.removed.directory)
    later, _ = _stored(tmp_path, "small")
    later.paths.lock.touch()
    from sweeps.run.removal import plan_removal, remove

    rest, _ = plan_removal(later.paths, runs=False)
    remove(rest)
    assert store.objects() == keys
    assert later.paths.exists()
    assert not made.paths.removed.directory.exists()


def test_runs_are_deleted_only_on_request(tmp_path: Path) -> None:
    sweeps = [MadeSweep(tmp_path, name) for name in ("asked", "kept", "other")]
    client = MlflowClient(tracking_uri(tmp_path))
    for made in sweeps:
        server = MlflowServer(
            tracking_uri(tmp_path), artifact_root(tmp_path), made.paths.name, made.ledger.sweep_id
        )
        experiment = server.open_experiment(None)
        tags = {TAG_SWEEP: made.ledger.sweep_id}
        server.create_run(experiment, 1, {**tags, TAG_ROLE: "sweep"})
        server.create_run(experiment, 2, {**tags, TAG_ROLE: "trial", TAG_TRIAL: "0"})

    def states(name: str) -> list[str]:
        found = client.get_experiment_by_name(name)
        assert found is not None
        runs = client.search_runs([found.experiment_id], run_view_type=ViewType.ALL)
        return [run.info.lifecycle_stage for run in runs]

    asked = _rm(tmp_path, "asked", "--mlflow")
    assert asked.exit_code == 0, asked.stderr
    assert "2 MLflow runs" in asked.stdout
    assert "mlflow gc --backend-store-uri" in asked.stdout
    assert _rm(tmp_path, "kept").exit_code == 0
    assert [states(name) for name in ("asked", "kept", "other")] == [
        ["deleted", "deleted"], ["active", "active"], ["active", "active"],
    ]  # fmt: skip
