"""Orphans: processes of a dead driver are found by its token, and no others are touched."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO

import psutil
import pytest

from sweeps.engine import process_cleanup
from sweeps.engine.fluent_mlflow import RunIgnorer
from sweeps.engine.process_cleanup import (
    TOKEN_VARIABLE,
    claim_scratch,
    clean_up_dead_drivers,
    end_orphans,
    find_orphans,
    kill_children,
    scratch_directory,
    tag_child_processes,
)
from tests.time_limits import Deadline, scaled

_SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def _start(code: str, token: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, TOKEN_VARIABLE: token},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    return child


def test_only_the_tokens_own_processes_end() -> None:
    with _start(_SLEEP, "dead-driver") as ours, _start(_SLEEP, "other-driver") as other:
        try:
            assert [process.pid for process in find_orphans("dead-driver")] == [ours.pid]
            assert end_orphans("dead-driver") == 1
            assert not psutil.pid_exists(ours.pid) or psutil.Process(ours.pid).status() == "zombie"
            assert other.poll() is None
        finally:
            kill_children("other-driver")


def test_child_started_during_cleanup_is_killed_too() -> None:
    code = """
import subprocess
print("up", flush=True)
for _ in range(300):
    subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
"""
    with _start(code, "starting") as parent:
        kill_children("starting")
        parent.wait(scaled(20))
    deadline = Deadline(5)  # what was killed is gone in a moment
    while find_orphans("starting"):
        assert not deadline.passed
        time.sleep(0.01)


def test_process_without_environment_is_found_by_its_log() -> None:
    directory = scratch_directory("titled-driver")
    directory.mkdir()
    code = f"log = open({str(directory / 'worker.log')!r}, 'w');" + _SLEEP
    with _start(code, "") as child:
        assert [process.pid for process in find_orphans("titled-driver")] == [child.pid]
        assert end_orphans("titled-driver") == 1
        assert not directory.exists()


def test_reader_of_a_drivers_log_is_left_alone() -> None:
    directory = scratch_directory("read-driver")
    directory.mkdir()
    log = directory / "worker.log"
    log.touch()
    with _start(f"log = open({str(log)!r});" + _SLEEP, "") as reader:
        try:
            assert [file.path for file in psutil.Process(reader.pid).open_files()] == [str(log)]
            assert end_orphans("read-driver") == 0
            assert reader.poll() is None
            assert not directory.exists()
        finally:
            reader.kill()


def test_this_process_is_never_an_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    tag_child_processes("me")
    assert find_orphans("me") == []


_DRIVER = """
import pathlib, sys, time
from sweeps.engine import process_cleanup
process_cleanup._PLACE = pathlib.Path(sys.argv[2])
alive = process_cleanup.claim_scratch(sys.argv[1])
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where drivers have their directories, instead of the machine's."""
    monkeypatch.setattr("sweeps.engine.process_cleanup._PLACE", tmp_path)
    return tmp_path


def test_only_what_a_dead_driver_left_is_cleared(place: Path) -> None:
    tokens = [uuid.uuid4().hex for _ in range(2)]
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", _DRIVER, token, str(place)], stdout=subprocess.PIPE, text=True
        )
        for token in tokens
    ]
    for driver in drivers:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
    dead, living = map(scratch_directory, tokens)
    code = f"log = open({str(dead / 'worker.log')!r}, 'w');" + _SLEEP
    try:
        with _start(code, "") as worker:
            clean_up_dead_drivers()
            assert dead.exists()
            assert worker.poll() is None
            drivers[0].kill()
            drivers[0].wait()
            assert clean_up_dead_drivers() == (1, 1)
            assert not psutil.pid_exists(worker.pid)
        assert not dead.exists()
        assert living.exists()
        assert drivers[1].poll() is None
    finally:
        for driver, token in zip(drivers, tokens, strict=True):
            driver.kill()
            driver.communicate()
            end_orphans(token)


@pytest.mark.usefixtures("place")
def test_a_directory_that_is_not_a_drivers_stays() -> None:
    stranger = scratch_directory("0123456789abcdef")
    stranger.mkdir()
    assert clean_up_dead_drivers() == (0, 0)
    assert stranger.exists()


_UNFINISHED = """
import os, pathlib, sys
from sweeps.engine import process_cleanup
process_cleanup._PLACE = pathlib.Path(sys.argv[2])

def die(*_, **__):
    os.kill(os.getpid(), 9)

if sys.argv[3] == "lock":
    process_cleanup.fcntl.flock = die
elif sys.argv[3] == "rename":
    pathlib.Path.rename = die
else:
    process_cleanup.open = die
process_cleanup.claim_scratch(sys.argv[1])
"""


@pytest.mark.parametrize("died_at", ["open", "lock", "rename"])
def test_driver_killed_before_its_directory_leaves_nothing(place: Path, died_at: str) -> None:
    token = uuid.uuid4().hex
    died = subprocess.run(
        [sys.executable, "-c", _UNFINISHED, token, str(place), died_at], check=False
    )
    assert died.returncode == -9
    assert [path.name for path in place.iterdir()] == [f".gradsweep-{token}"]
    living = place / f".gradsweep-{uuid.uuid4().hex}"
    living.mkdir()
    with open(living / "driver", "w", encoding="utf-8") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        assert clean_up_dead_drivers() == (1, 0)
        assert list(place.iterdir()) == [living]


def test_driver_mistaken_for_dead_recreates_its_directory(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, flock, cleaned = uuid.uuid4().hex, fcntl.flock, []

    def clean_up_first(file: IO[str], operation: int) -> None:
        if not cleaned:
            monkeypatch.setattr(fcntl, "flock", flock)
            cleaned.append(clean_up_dead_drivers())
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", clean_up_first)
    with claim_scratch(token):
        assert cleaned == [(1, 0)]
        assert list(place.iterdir()) == [scratch_directory(token)]
        assert clean_up_dead_drivers() == (0, 0)


def test_directory_of_another_user_ends_no_process(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may make a directory there that has a living driver's token in its name."""
    token = uuid.uuid4().hex
    with _start(_SLEEP, token) as worker:
        for name in (f"gradsweep-{token[:12]}", f".gradsweep-{token}"):
            (place / name).mkdir()
            (place / name / "driver").touch()
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        assert clean_up_dead_drivers() == (0, 0)
        assert worker.poll() is None
        assert len(list(place.iterdir())) == 2
        monkeypatch.setattr(os, "geteuid", lambda: me)
        assert clean_up_dead_drivers() == (1, 1)


@pytest.mark.usefixtures("place")
def test_other_users_cannot_enter_a_drivers_directory() -> None:
    before, token = os.umask(0), uuid.uuid4().hex
    try:
        with claim_scratch(token):
            assert scratch_directory(token).stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_artifacts_of_a_rank_go_with_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_cleanup, "_PLACE", tmp_path)
    token = "0123456789abcdef" * 2
    monkeypatch.setenv(process_cleanup.TOKEN_VARIABLE, token)
    scratch = process_cleanup.scratch_directory(token)
    scratch.mkdir()
    directory = RunIgnorer().directory()
    assert directory is not None
    assert directory.is_dir()
    assert directory.parent == scratch
