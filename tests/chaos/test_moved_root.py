"""Row 47: a root is copied or moved, and its sweep is resumed there."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from sweeps.paths import artifact_root, tracking_uri
from tests.integration.commandline import TINY, CommandLine
from tracking.ui_artifacts import below

TASK = """
from trainable.tasks.digits import Digits

class Mine(Digits):
    pass
"""
SPEC = TINY.replace("name: digits,", "name: 'my_task:Mine',")


def _digests(directory: Path) -> dict[str, str]:
    """The digest of each file; an index that SQLite makes to read is none."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


def _shown(root: Path) -> dict[str, list[str]]:
    """The files that the pages of `sweep ui` show of each run, by the run's name."""
    client, reader = MlflowClient(tracking_uri(root)), below(artifact_root(root))
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    return {
        run.info.run_name: [file.path for file in reader(run.info.artifact_uri).list_artifacts()]
        for run in runs
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """A finished sweep below `project/runs`, with its task beside it."""
    project = tmp_path_factory.mktemp("moved") / "project"
    project.mkdir()
    cli = CommandLine(project)
    cli.write("my_task.py", TASK)
    cli.write("small.yaml", SPEC)
    cli.ok("run", "small.yaml")
    return cli


@pytest.fixture
def elsewhere(tmp_path: Path) -> CommandLine:
    """A directory without the task."""
    return CommandLine(tmp_path)


@pytest.mark.chaos
@pytest.mark.fault(48, "a root is copied, and the copy is resumed")
def test_row_48_copied_root(trained: CommandLine, elsewhere: CommandLine) -> None:
    copy = elsewhere.directory / "copy"
    shutil.copytree(trained.root, copy, symlinks=True)
    before = _digests(trained.root)
    verified = elsewhere.json("audit", "small", "--files", "--root", str(copy))
    assert verified["is_sound"]
    assert f"the root was at {trained.root}: MLflow has addresses" in verified["notes"][0]
    # The copy has not recorded where its code is; the message says where the original's is.
    refused = elsewhere("resume", "small", "--root", str(copy), "-s", "trials=3")
    assert refused.returncode == 2
    assert f"the sweep last ran in {trained.directory}" in refused.stderr
    shutil.copy(trained.directory / "my_task.py", elsewhere.directory)
    elsewhere.ok("resume", "small", "--root", str(copy), "-s", "trials=3")
    assert _digests(trained.root) == before
    assert elsewhere.json("audit", "small", "--files", "--root", str(copy))["notes"] == []
    shown = _shown(copy)
    assert len(shown) == 4
    assert "best" in shown["small"]
    best = next(copy.glob("mlartifacts/small/*/artifacts/best/model.safetensors"))
    exported = elsewhere.directory / "exported"
    elsewhere.ok("best", "small", "--root", str(copy), "--export", str(exported))
    assert best.read_bytes() == (exported / "model.safetensors").read_bytes()


@pytest.mark.chaos
@pytest.mark.fault(48, "a root is moved, and resumed, verified, exported and reported there")
def test_row_48_moved_root(trained: CommandLine, elsewhere: CommandLine) -> None:
    kept, root = trained.root.with_name("kept"), elsewhere.directory / "moved"
    shutil.copytree(trained.root, kept, symlinks=True)
    trained.root.rename(root)
    try:
        where = ("small", "--root", str(root))
        printed = elsewhere.ok("resume", *where, "-s", "trials=3")
        assert "complete" in printed
        assert "is sound" in elsewhere.ok("audit", *where, "--files")
        elsewhere.ok("sync", *where, "--verify")
        elsewhere.ok("best", *where, "--export", "exported")
        elsewhere.ok("report", *where, "--output", "report.html")
        elsewhere.ok("audit", *where, "1", "--reproduce", "--dir", "again")
        assert (elsewhere.directory / "again" / "metrics.jsonl").exists()
        assert not trained.root.exists()
        assert "best" in _shown(root)["small"]
    finally:
        kept.rename(trained.root)
