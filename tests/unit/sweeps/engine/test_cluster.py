"""Cluster code without a cluster: addresses, uploaded code, answers of nodes, lost clusters."""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sweeps.cli import messages
from sweeps.engine import cluster, cluster_address
from sweeps.engine.cluster import (
    Cluster,
    _make_check,
    _shared_directory,
    _unseen,
    fault_of,
    package_code,
    refusal,
)
from sweeps.engine.cluster_address import (
    ClusterRefused,
    find_address,
    locate,
)
from sweeps.engine.ray_compat.ray_internals import visit_uploaded
from sweeps.paths import SweepPaths

NODE: dict[str, Any] = {
    "NodeManagerHostname": "gpu-3",
    "NodeManagerAddress": "10.0.0.3",
    "NodeName": "10.0.0.3",
    "Resources": {"CPU": 8.0, "memory": 2.0**34, "node:10.0.0.3": 1.0},
}
FINE: dict[str, Any] = {"version": "1.2", "fault": None, "store": None, "gpus": []}


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of somebody who listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("given", "environ", "found"),
    [
        (None, {}, None),
        (None, {"RAY_ADDRESS": ""}, None),
        (None, {"RAY_ADDRESS": "local"}, None),
        (None, {"RAY_ADDRESS": "head:6379"}, "head:6379"),
        ("", {"RAY_ADDRESS": "head:6379"}, None),
        ("local", {"RAY_ADDRESS": "head:6379"}, None),
        ("10.0.0.5:6379", {"RAY_ADDRESS": "head:6379"}, "10.0.0.5:6379"),
        ("[::1]:6379", {}, "[::1]:6379"),
        ("auto", {}, "auto"),
    ],
)
def test_addresses(given: str | None, environ: dict[str, str], found: str | None) -> None:
    assert find_address(given, environ) == found


@pytest.mark.parametrize("wrong", ["head", "head:", ":6379", "head:0", "head:65536", "head:63x"])
def test_invalid_address_is_refused(wrong: str) -> None:
    for given, environ, name in [(wrong, {}, "--address"), (None, {"RAY_ADDRESS": wrong}, None)]:
        with pytest.raises(ClusterRefused) as refused:
            find_address(given, environ)
        assert str(refused.value).startswith(f"{name or 'RAY_ADDRESS'} {wrong}: is no address; ")
        assert "HOST:PORT" in str(refused.value)


def test_ray_client_address_is_refused_with_the_right_one() -> None:
    with pytest.raises(
        ClusterRefused, match=r"Ray Client, .*HOST:PORT .*\(port 6379, not 10001\)"
    ):
        find_address("ray://head:10001", {})


def test_unreachable_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(cluster_address, "heads_of_local_nodes", lambda: {nobody})
    with pytest.raises(ClusterRefused, match=f"no process answers at {nobody} .*refused"):
        locate(nobody)


def test_this_machine_must_be_a_node(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_address, "heads_of_local_nodes", lambda: {"127.0.0.1:1"})
    with pytest.raises(ClusterRefused, match=f"ray start --address={listener} --num-cpus=0"):
        locate(listener)


def test_auto_finds_the_one_cluster_of_this_machine(
    listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: set[str] = {listener}
    monkeypatch.setattr(cluster_address, "heads_of_local_nodes", lambda: heads)
    assert locate("auto") == listener
    heads.add("10.0.0.9:6379")
    with pytest.raises(ClusterRefused, match=r"a node of several: 10\.0\.0\.9:6379, "):
        locate("auto")
    heads.clear()
    with pytest.raises(ClusterRefused, match="a node of none"):
        locate("auto")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "task.py": 10,
        "package/deep/module.py": 20,
        "data/large [1].bin": 300,
        "data/small.csv": 30,
        ".gitignore": 0,
        "ignored/x": 50,
        ".git/objects": 50,
        ".venv/lib/x.py": 50,
        "runs/sweep/trials/0000/state.pt": 50,
        "package/__pycache__/x.pyc": 50,
    }
    for name, size in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (tmp_path / ".gitignore").write_text("ignored/\n")
    return tmp_path


def _sent(package: cluster.CodePackage) -> set[str]:
    """What Ray itself puts into its package, of the same directory with the same excludes."""
    found: list[Path] = []
    visit_uploaded(package.directory, package.excludes, found.append)
    return {str(path.relative_to(package.directory)) for path in found if path.is_file()}


def test_uploaded_code_excludes_sweeps_and_large_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "LARGE", 200)
    package = package_code(project, project / "runs", ["task"])
    assert package is not None
    assert _sent(package) == {"task.py", "package/deep/module.py", "data/small.csv", ".gitignore"}
    assert package.size == 10 + 20 + 30 + len("ignored/\n")
    assert package.left == (("data/large [1].bin", 300),)
    assert "200 B each: data/large [1].bin (300 B); put such" in str(package.warning())


@pytest.mark.parametrize("ignored", ["task.py", "deep/"])
def test_task_code_ignored_by_git_is_refused(project: Path, ignored: str) -> None:
    (project / ".gitignore").write_text(f"{ignored}\n")
    with pytest.raises(
        ClusterRefused, match=r"(task|deep/module)\.py is not uploaded to the clus"
    ):
        package_code(project, project / "runs", ["json", "task", "package.deep.module"])


def test_oversized_upload_is_refused_and_largest_file_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "LIMIT", 300)
    with pytest.raises(ClusterRefused) as refused:
        package_code(project, project / "runs", ["task"])
    assert "369 B would be uploaded" in str(refused.value)
    assert "the largest are data/ (330 B), package/ (20 B), task.py (10 B)" in str(refused.value)
    monkeypatch.setattr(cluster, "MOST_FILES", 3)
    with pytest.raises(ClusterRefused, match=r"more than 3 files .* most are in "):
        package_code(project, project / "runs", ["task"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (FINE, None),
        (FINE | {"version": "1.1"}, "has gradsweep 1.1; this process has 1.2, .*==1.2"),
        (FINE | {"version": None}, "has no gradsweep; this process has 1.2"),
        (FINE | {"fault": "the driver's files are not there"}, "/r: the .* shared file system"),
        (FINE | {"store": "s3://b/p cannot"}, "storage.checkpoints: s3://b/p cannot$"),
        ("did not answer within 60 s", "did not answer within 60 s; every node must"),
    ],
)
def test_node_faults_are_named(answer: dict[str, Any] | str, said: str | None) -> None:
    fault = fault_of(answer, "1.2", Path("/r"))
    if said is None:
        assert fault is None
    else:
        assert re.match(said, str(fault)), fault


class AuthenticationError(Exception):
    """As Ray's is called."""


def test_why_ray_did_not_let_us_in_is_one_sentence() -> None:
    outer = ConnectionError("Failed to connect to Ray cluster at head:1")
    outer.__cause__ = AuthenticationError("401")
    assert "its token is missing or wrong" in refusal("head:1", outer)
    versions = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9\n")
    said = refusal("head:1", versions)
    assert "cannot be used: Version mismatch: The cluster was started with: Ray: 2.9;" in said
    outer.__cause__ = RuntimeError("no session\nname")
    assert "cannot be used: no session name; run" in refusal("head:1", outer)


def test_cluster_is_lost_with_its_head_or_this_node(listener: str, tmp_path: Path) -> None:
    socket_of_node = tmp_path / "raylet"
    with socket.socket(socket.AF_UNIX) as node:
        node.bind(str(socket_of_node))
        node.listen()
        assert Cluster(listener, (), str(socket_of_node)).health_error() is None
        assert not Cluster(listener, (), str(socket_of_node)).node_died(RuntimeError("its own"))
        assert Cluster("127.0.0.1:1", (), str(socket_of_node)).node_died(RuntimeError("no head"))
        gone = Cluster("127.0.0.1:1", (), str(socket_of_node)).health_error()
    assert "its head at 127.0.0.1:1 does not answer" in str(gone)
    assert "its node on this machine is gone" in str(
        Cluster(listener, (), str(socket_of_node)).health_error()
    )


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ([], ""),
        (["--address", "head:1"], " --address head:1"),
        (["--address=head:1", "-s", "trials=3"], " --address=head:1"),
    ],
)
def test_the_command_that_continues_has_the_address(
    words: list[str], end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sweep", "run", "x.yaml", *words])
    said = io.StringIO()
    messages.resume(Console(file=said), SweepPaths(tmp_path, "x"))
    assert said.getvalue() == f"sweep resume x --root {tmp_path}{end}\n"


def test_node_reports_whether_it_sees_the_probe_file(tmp_path: Path) -> None:
    """What runs on a node, run here; a directory of its own does not have the driver's file."""
    ours = version("gradsweep")
    look = partial(_make_check(), name="node", mark="mark", ours=ours, store=None)
    assert look(str(tmp_path / "missing"))["fault"] == "the driver's files are not there"
    (tmp_path / "driver").write_text("another mark")
    assert "other files" in look(str(tmp_path))["fault"]
    (tmp_path / "driver").write_text("mark")
    answer = look(str(tmp_path))
    assert (answer["fault"], answer["version"], answer["store"]) == (None, ours, None)
    assert (tmp_path / "node").read_text() == "mark"


def test_probe_file_of_a_node_unseen_here_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_SEEN_SECONDS", 0.2)
    (tmp_path / "node").write_text("mark")
    assert _unseen(tmp_path / "node", "mark", tmp_path) is None
    said = str(_unseen(tmp_path / "other", "mark", tmp_path))
    assert said.startswith(f"{tmp_path}: the driver does not see the node's files; every node")


def test_probe_files_of_a_killed_driver_are_removed(tmp_path: Path) -> None:
    left, live = tmp_path / ".nodes-left", tmp_path / ".nodes-live"
    for directory in (left, live):
        directory.mkdir()
        (directory / "driver").touch()
    long_ago = time.time() - 3600
    os.utime(left, (long_ago, long_ago))
    with _shared_directory(tmp_path) as place:
        assert not left.exists()
        assert place.is_dir()
    assert [*tmp_path.iterdir()] == [live], "somebody else's may be in use"
