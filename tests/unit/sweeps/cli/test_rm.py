"""`sweep list --remove`: removes one sweep alone, after a yes, and continues after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.paths import SweepPaths, list_sweeps
from sweeps.run import removal
from sweeps.sweep_lock import SweepLock
from tests.unit.sweeps.sweep_factory import MadeSweep

KILLED = """
import os, signal, sys
from sweeps.cli.app import app
left = int(sys.argv.pop(1))
def count(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
app()
"""
"""`sweep`, killed right before the change of a directory that the first argument counts."""


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    return _made(tmp_path / "runs", "small")


def _made(root: Path, name: str) -> MadeSweep:
    made = MadeSweep(root, name)
    for value in (0.5, 0.4):
        number = made.add("complete", value)
        generation = made.paths.trial(number) / "checkpoints/step-00000010"
        generation.mkdir(parents=True)
        (generation / "state.pt").write_bytes(bytes(1000))
    return made


def _rm(root: Path, *words: str, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["list", "--remove", *words, "--root", str(root)], input=answer)


def _files(root: Path) -> dict[Path, bytes | None]:
    found = sorted(root.rglob("*"))
    return {path: path.read_bytes() if path.is_file() else None for path in found}


def test_sweep_is_removed_and_others_stay(sweep: MadeSweep) -> None:
    root = sweep.paths.root
    other = _made(root, "other").paths.directory
    before = _files(other)
    done = _rm(root, "small", "--yes")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("removed sweep 'small': 2 trials, ")
    assert list(root.iterdir()) == [other]
    assert _files(other) == before


@pytest.mark.parametrize(("answer", "code"), [("", 2), ("\n", 1), ("no\n", 1), ("Yes\n", 0)])
def test_sweep_is_removed_only_after_a_yes(sweep: MadeSweep, answer: str, code: int) -> None:
    before = _files(sweep.paths.root)
    done = _rm(sweep.paths.root, "small", answer=answer)
    assert done.exit_code == code
    assert "sweep 'small': 2 trials, " in done.stderr  # what would be removed
    if code:
        assert "nothing was removed" in done.output
        assert _files(sweep.paths.root) == before
    else:
        assert not list(sweep.paths.root.iterdir())


def test_running_sweep_is_not_removed(sweep: MadeSweep) -> None:
    lock = SweepLock(sweep.paths.lock)
    lock.acquire()
    before = _files(sweep.paths.root)
    try:
        done = _rm(sweep.paths.root, "small", "--yes")
    finally:
        lock.release()
    assert (done.exit_code, done.stdout) == (4, "")
    assert f"is already being run by process {os.getpid()} on " in done.stderr
    before[sweep.paths.lock] = b""
    assert _files(sweep.paths.root) == before


def test_what_links_lead_to_stays(sweep: MadeSweep, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_text("kept")
    for place in (sweep.paths.directory, sweep.paths.trial(0)):
        (place / "link").symlink_to(outside)
    os.rename(sweep.paths.ledger, tmp_path / "ledger.db")  # as users move one to a faster disk
    sweep.paths.ledger.symlink_to(tmp_path / "ledger.db")
    done = _rm(sweep.paths.root, "small", answer="y\n")
    assert done.exit_code == 0
    assert f"ledger.db -> {tmp_path / 'ledger.db'}" in done.stderr
    assert not list(sweep.paths.root.iterdir())
    assert (outside / "data").read_text() == "kept"
    assert (tmp_path / "ledger.db").exists()


@pytest.mark.parametrize("name", ["small", ".removed"])
def test_linked_directory_is_refused(sweep: MadeSweep, tmp_path: Path, name: str) -> None:
    root, outside = sweep.paths.root, tmp_path / "outside"
    if name == "small":
        os.rename(sweep.paths.directory, outside)
    else:
        outside.mkdir()
    (root / name).symlink_to(outside)
    before = _files(tmp_path)
    done = _rm(root, "small", "--yes")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{root / name} is a symbolic link to {outside}" in done.stderr
    assert _files(tmp_path) == before


def test_copy_is_removed_without_what_it_was_copied_from(sweep: MadeSweep) -> None:
    original = sweep.paths
    copy = SweepPaths(original.root, "copy")
    subprocess.run(["cp", "-r", original.directory, copy.directory], check=True)
    before = _files(original.directory)
    refused = _rm(original.root, "copy", "--yes", "--mlflow")
    assert refused.exit_code == 2
    assert "its runs belong to sweep 'small'" in refused.stderr
    assert copy.exists()
    assert _rm(original.root, "copy", "--yes").exit_code == 0
    assert not copy.directory.exists()
    assert _files(original.directory) == before


def test_damaged_sweep_can_be_removed(sweep: MadeSweep) -> None:
    sweep.paths.ledger.write_bytes(b"no database")
    assert _rm(sweep.paths.root, "small", "--yes").exit_code == 0
    assert not list(sweep.paths.root.iterdir())


def test_removal_that_was_killed_anywhere_is_completed(sweep: MadeSweep) -> None:
    root = sweep.paths.root
    other = _made(root, "other").paths.directory
    before = _files(other)
    words = ["list", "small", "--remove", "--yes", "--root", str(root)]
    num_kills = 0
    while True:
        child = subprocess.run(
            [sys.executable, "-c", KILLED, str(num_kills), *words],
            capture_output=True,
            check=False,
        )
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL, child.stderr
        num_kills += 1
        whole = sweep.paths.exists()
        assert (sweep.paths in list_sweeps(root)) == whole
        if whole:  # nothing is missing yet
            assert sweep.view.status()["trials"]["complete"] == 2
        else:
            assert not sweep.paths.directory.exists()
            is_done = not sweep.paths.removed.directory.exists()
            assert _rm(root, "small", "--yes").exit_code == (2 if is_done else 0)
            assert not sweep.paths.removed.directory.exists()
            _made(root, "small")
        assert _files(other) == before
    assert num_kills > 8
    assert list(root.iterdir()) == [other]


def test_interrupted_removal_names_the_command_that_completes_it(
    sweep: MadeSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(removal.shutil, "rmtree", interrupt)
    done = _rm(sweep.paths.root, "small", "--yes", "--mlflow")
    assert (done.exit_code, done.stdout) == (130, "")
    assert f"sweep list small --remove --yes --mlflow --root {sweep.paths.root}" in done.stderr
    assert not sweep.paths.exists()


def test_new_sweep_and_the_rest_of_an_earlier_one_are_removed(sweep: MadeSweep) -> None:
    root = sweep.paths.root
    rest = sweep.paths.removed.directory
    rest.parent.mkdir()
    sweep.paths.directory.rename(rest)
    _made(root, "small")
    done = _rm(root, "small", answer="y\n")
    assert done.exit_code == 0
    assert f"{rest}: the rest of an interrupted removal" in done.stderr
    assert not list(root.iterdir())
