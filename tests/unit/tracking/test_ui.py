from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from mlflow.exceptions import MlflowException

from tracking.ui import PortTaken, compare_page, metrics_page, runs_page, start_server
from tracking.ui_artifacts import Artifacts, below


def test_the_runs_page_orders_by_a_metric() -> None:
    url = runs_page("http://127.0.0.1:5000/", "12", "best/val/loss", ascending=True)
    assert url == (
        "http://127.0.0.1:5000/#/experiments/12/runs?workflowType=machine_learning"
        "&orderByKey=metrics.%60best%2Fval%2Floss%60&orderByAsc=true"
    )


def test_the_compare_page_names_runs_and_experiment() -> None:
    url = compare_page("http://h:1", ["a1", "b2"], ["12"])
    path, query = urlsplit(url).fragment.split("?")
    assert path == "/compare-runs"
    found = parse_qs(query)
    assert found.pop("workflowType") == ["machine_learning"]
    assert {key: json.loads(value) for key, [value] in found.items()} == {
        "runs": ["a1", "b2"],
        "experiments": ["12"],
    }


def test_the_metric_page_names_the_curves() -> None:
    url = metrics_page("http://h:1/", ["a1"], ["12", "7"], ["val/loss", "train/loss"])
    path, query = urlsplit(url).fragment.split("?")
    assert path == "/metric"
    found = parse_qs(query)
    assert (found.pop("x_axis"), found.pop("workflowType")) == (["step"], ["machine_learning"])
    assert {key: json.loads(value) for key, [value] in found.items()} == {
        "runs": ["a1"],
        "metric": "val/loss",
        "experiments": ["12", "7"],
        "plot_metric_keys": ["val/loss", "train/loss"],
    }


def test_used_port_is_refused_immediately(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} of .* cannot be used .* --port 0"):
            start_server(f"sqlite:///{tmp_path}/mlflow.db", tmp_path, port=port)
    with pytest.raises(PortTaken, match="from 1 to 65535"):
        start_server(f"sqlite:///{tmp_path}/mlflow.db", tmp_path, port=70000)


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
