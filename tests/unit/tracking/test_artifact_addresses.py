"""Addresses of artifacts follow their root, and nothing is written outside of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tracking.artifact_addresses import ArtifactsElsewhere, check_inside, is_outside
from tracking.trackers import MlflowTracker
from tracking.trusted_stores import add_trusted


@pytest.fixture(autouse=True)
def _own_trust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root at `a root/runs` with an experiment, a run, its artifact, and a registered model."""
    root = tmp_path_factory.mktemp("a root") / "runs"
    root.mkdir()
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    location = (root / "mlartifacts" / "small").as_uri()
    experiment = client.create_experiment("small", artifact_location=location)
    run = client.create_run(experiment).info
    client.log_text(run.run_id, "weights", "best/model.txt")
    client.create_registered_model("model")
    client.create_model_version("model", f"{run.artifact_uri}/best", run_id=run.run_id)
    other = (root.parent / "chosen").as_uri()
    client.create_experiment("chosen", artifact_location=other)
    return root


def _tracker(root: Path) -> MlflowTracker:
    return MlflowTracker(f"sqlite:///{root / 'mlflow.db'}", root / "mlartifacts")


def test_addresses_of_a_copy_become_its_own(stored: Path, tmp_path: Path) -> None:
    copy = tmp_path / "über copy"
    shutil.copytree(stored, copy)
    tracker = _tracker(copy)
    before = (copy / "mlflow.db").read_bytes()
    assert tracker.correct_addresses(dry_run=True) == [stored / "mlartifacts"]
    assert tracker.addresses_outside("small") == []
    assert (copy / "mlflow.db").read_bytes() == before
    assert tracker.correct_addresses() == [stored / "mlartifacts"]
    assert tracker.addresses_outside("small") == []
    assert tracker.correct_addresses() == []
    client = MlflowClient(tracker.uri)
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    artifacts = copy / "mlartifacts" / "small" / run.info.run_id / "artifacts"
    assert run.info.artifact_uri == artifacts.as_uri()
    assert client.get_model_version("model", "1").source == f"{artifacts.as_uri()}/best"
    assert _tracker(stored).addresses_outside("small") == []


def test_another_address_is_not_corrected(stored: Path) -> None:
    tracker = _tracker(stored)
    assert tracker.correct_addresses() == []
    assert tracker.addresses_outside("chosen") == [(stored.parent / "chosen").as_uri()]


def test_files_that_were_left_behind_keep_their_address(stored: Path, tmp_path: Path) -> None:
    """Only the database was copied: its runs still have their files in the old place."""
    shutil.copy(stored / "mlflow.db", tmp_path)
    tracker = _tracker(tmp_path)
    assert tracker.correct_addresses() == []
    assert len(tracker.addresses_outside("small")) == 2


def test_database_outside_of_the_root_is_not_changed(stored: Path, tmp_path: Path) -> None:
    before = (stored / "mlflow.db").read_bytes()
    tracker = MlflowTracker(f"sqlite:///{stored / 'mlflow.db'}", tmp_path / "mlartifacts")
    assert tracker.correct_addresses() == []
    assert len(tracker.addresses_outside("small")) == 2
    assert (stored / "mlflow.db").read_bytes() == before


@pytest.mark.parametrize(
    ("address", "outside"),
    [
        ("file:///r/mlartifacts/a", False),
        ("/r/mlartifacts/a", False),
        ("s3://bucket/a", False),  # a store; see `check_trusted`
        ("mlflow-artifacts:/a", False),
        ("file:///r/mlartifacts/../../elsewhere", True),
        ("file:///r/mlartifacts-2/a", True),
        ("file://host/r/mlartifacts/a", True),
        ("mlruns/0", True),
    ],
)
def test_only_files_below_the_root_are_inside(address: str, outside: bool) -> None:
    assert is_outside(address, Path("/r/mlartifacts")) is outside


def test_link_below_the_address_is_followed(tmp_path: Path) -> None:
    root, original = tmp_path / "mlartifacts", tmp_path / "original"
    (root / "a").mkdir(parents=True)
    original.mkdir()
    (root / "a" / "best").symlink_to(original)
    check_inside((root / "a").as_uri(), root, "other/model.txt")
    with pytest.raises(ArtifactsElsewhere, match=f"which leads to {original}"):
        check_inside((root / "a").as_uri(), root, "best")


def test_trusted_directory_is_written_to(tmp_path: Path) -> None:
    root, chosen = tmp_path / "mlartifacts", tmp_path / "a chosen one"
    with pytest.raises(
        ArtifactsElsewhere, match=r"sweep doctor --trust file:///.*a%20chosen%20one"
    ) as one:
        check_inside(chosen.as_uri(), root)
    add_trusted(str(one.value).rpartition(" ")[2], explicit=True)
    check_inside(chosen.as_uri(), root, "best/model.txt")
    with pytest.raises(ArtifactsElsewhere):
        check_inside(tmp_path.as_uri(), root)
