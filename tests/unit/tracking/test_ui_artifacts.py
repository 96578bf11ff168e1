"""The server of `sweep ui` follows no link below a run's artifacts."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from tracking.ui_artifacts import Artifacts, below


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    """Those of a run, with links to a file and to a folder beside it."""
    run, beside = tmp_path / "root" / "run", tmp_path / "beside"
    for folder in (run, beside):
        folder.mkdir(parents=True)
        (folder / "loss.txt").write_text(folder.name)
    (run / "file").symlink_to(beside / "loss.txt")
    (run / "folder").symlink_to(beside)
    return below(tmp_path / "root")(run.as_uri())


def test_own_files_are_read(artifacts: Artifacts, tmp_path: Path) -> None:
    artifacts.download_to("loss.txt", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_text() == "run"
    assert [one.path for one in artifacts.list_artifacts()] == ["loss.txt"]


@pytest.mark.parametrize("path", ["file", "folder/loss.txt"])
def test_links_are_not_followed(artifacts: Artifacts, tmp_path: Path, path: str) -> None:
    with pytest.raises(MlflowException, match="cannot be read"):
        artifacts.download_to(path, str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()
    assert artifacts.list_artifacts("folder") == []
