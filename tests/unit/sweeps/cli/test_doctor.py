"""`sweep doctor`: its findings, and that it leaves no files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import uuid
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from optuna.samplers import RandomSampler

from sweeps.engine.process_cleanup import TOKEN_VARIABLE
from sweeps.engine.resources import Gpu, Machine
from sweeps.ledger.ledger import Ledger
from sweeps.paths import SweepPaths
from sweeps.run import doctor
from sweeps.run.doctor import Finding, check_sweeps, clean_up, examine
from sweeps.spec.revisions import write_spec
from sweeps.spec.spec import parse_spec
from sweeps.sweep_lock import SweepLock
from tests.make_trials import ask
from tests.unit.sweeps.sweep_factory import MadeSweep

GIB = 1024**3
Usage = namedtuple("Usage", ["total", "used", "free"])
Mount = namedtuple("Mount", ["device", "mountpoint", "fstype", "opts"])


def _named(findings: list[Finding], what: str) -> Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def test_healthy_machine_passes_and_leaves_no_files(tmp_path: Path) -> None:
    root = tmp_path / "new" / "runs"
    extra = Finding("warn", "left-over processes", "2", "end them")
    findings = examine(root, [extra])
    assert findings[-1] is extra
    assert _named(findings, "torch").level == "ok"
    assert _named(findings, "loopback").level == "ok"
    assert _named(findings, "storage").detail == f"{root} can be created in {tmp_path}"
    assert list(tmp_path.iterdir()) == []
    assert all(finding.remedy for finding in findings if finding.level != "ok")


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.write_text("")
    assert _named(examine(root), "storage") == Finding(
        "fail",
        "storage",
        f"{root}: cannot write files there (Not a directory)",
        "choose another directory with --root, or correct its permissions",
    )


@pytest.mark.parametrize(
    ("free", "level"), [(GIB // 4, "fail"), (2 * GIB, "warn"), (50 * GIB, "ok")]
)
def test_free_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(100 * GIB, 0, free))
    assert _named(examine(tmp_path), "disk").level == level


def test_reported_machine_is_the_probed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine("node", 2, 3 * GIB, (Gpu("H200", 139 * GIB),))
    monkeypatch.setattr(Machine, "probe", lambda: machine)
    monkeypatch.setattr(doctor, "_driver", lambda: "570.1")
    findings = examine(tmp_path)
    assert _named(findings, "CPUs").detail == "2 usable by this process"
    assert _named(findings, "memory").level == "warn"
    assert _named(findings, "GPU 0").detail == "H200, 139 GiB, driver 570.1"


def _recording_at(root: Path, **addresses: str) -> list[Finding]:
    for name, uri in addresses.items():
        MadeSweep(root, name, more=f"tracking: {{uri: '{uri}'}}")
    return [finding for finding in examine(root) if finding.what == "tracking"]


def test_unreachable_tracking_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    file, gone = _recording_at(tmp_path, one="sqlite:///x.db", two=f"http://127.0.0.1:{port}")
    assert file.level == "ok"
    assert gone.level == "fail"
    assert gone.detail.startswith(f"http://127.0.0.1:{port} cannot be reached (")
    assert "--offline" in gone.remedy


def test_address_known_to_mlflow_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:geheim@127.0.0.1:1")
    used, ignored = _recording_at(tmp_path)
    assert used == Finding("ok", "tracking", "embedded in the root directory")
    assert ignored == Finding(
        "warn",
        "tracking",
        "MLFLOW_TRACKING_URI is set and ignored; a sweep records to its own tracking.uri",
        "run with --tracking-uri, or write tracking.uri into the spec",
    )


def test_leftovers_of_a_dead_driver_are_removed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.engine.process_cleanup._PLACE", tmp_path / "place")
    token = uuid.uuid4().hex
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits/sweep.yaml").touch()
    holder = {"host": "here", "pid": 1, "started": 0.0, "token": token}
    (tmp_path / "digits/lock").write_text(json.dumps(holder))
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, TOKEN_VARIABLE: token})
    (finding,) = clean_up(tmp_path)
    assert finding.level == "ok"
    assert finding.detail == "ended 1 processes of 1 dead drivers"
    assert child.wait(5) is not None
    (finding,) = clean_up(tmp_path)
    assert finding.detail == "none of dead drivers"


def test_interrupted_cleanup_is_named_and_left_to_resume(tmp_path: Path) -> None:
    paths = SweepPaths(tmp_path, "quad")
    paths.directory.mkdir()
    spec = parse_spec("{name: quad, task: digits, metric: val/loss, mode: min, trials: 2}", "quad")
    write_spec(paths.spec, spec)
    ledger = Ledger.create(paths.ledger, mode="min", sweep_id="s")
    assert check_sweeps(tmp_path) == []
    ledger.finish(ask(ledger, {}, RandomSampler()).number, "pruned")
    [found] = check_sweeps(tmp_path)
    assert (found.level, found.what) == ("warn", "quad")
    assert found.detail == (
        "trial 0: tracking has no run of it; "
        "trial 0: tracking does not know that its run is FINISHED"
    )
    assert found.remedy.endswith(f"sweep resume quad --root {tmp_path}")
    lock = SweepLock(paths.lock)
    lock.acquire()
    assert check_sweeps(tmp_path) == [], "a live driver is not second-guessed"
    lock.release()
    paths.spec.write_bytes(b"")
    [found] = check_sweeps(tmp_path)
    assert found.level == "fail"
    assert "has no valid revision" in found.detail


@pytest.mark.parametrize(
    ("fstype", "options", "level"),
    [
        ("nfs4", "rw,relatime,vers=4.2,local_lock=none", "ok"),
        ("nfs", "rw,vers=3,nolock,local_lock=all", "warn"),
        ("ext4", "rw", "ok"),
    ],
)
def test_locks_invisible_to_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fstype: str, options: str, level: str
) -> None:
    mounts = [
        Mount("/dev/root", "/", "nfs", "rw,nolock"),
        Mount("server:/home", str(tmp_path), fstype, options),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
    found = _named(examine(tmp_path / "runs"), "locks")
    assert found.level == level
    assert str(tmp_path) in found.detail
    assert bool(found.remedy) == (level == "warn")


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = _named(examine(tmp_path), "locks")
    assert (found.level, found.detail) == ("fail", f"{tmp_path}: cannot lock (No locks available)")
