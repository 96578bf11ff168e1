"""The lock: one driver per sweep, its holder named, a dead holder's lock free at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.lock import SweepHeld, SweepLock, is_held, read_holder

_HOLD = """
import sys, time
from pathlib import Path
from sweeps.lock import SweepLock
lock = SweepLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "digits" / "lock"


def _holder_process(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_second_holder_is_refused_and_told_who_holds_it(path: Path) -> None:
    with _holder_process(path) as child:
        try:
            assert is_held(path)
            with pytest.raises(SweepHeld) as refused:
                SweepLock(path).acquire()
            assert str(refused.value) == (
                f"sweep 'digits' is already being run by process {child.pid} "
                f"on {socket.gethostname()}; "
                "only one driver may run a sweep; watch it with: sweep status digits --watch"
            )
        finally:
            child.kill()


def test_a_killed_holders_lock_is_free_and_its_token_is_known(path: Path) -> None:
    with _holder_process(path) as child:
        token = json.loads(path.read_text())["token"]
        os.kill(child.pid, signal.SIGKILL)
    assert not is_held(path)
    lock = SweepLock(path)
    holder = lock.acquire()
    assert lock.previous is not None
    assert lock.previous.token == token
    assert holder.pid == os.getpid()
    lock.release()


def test_release_leaves_no_holder(path: Path) -> None:
    lock = SweepLock(path)
    lock.acquire()
    assert is_held(path)
    lock.release()
    assert not is_held(path)
    assert read_holder(path) is None
    again = SweepLock(path)
    again.acquire()
    assert again.previous is None
    again.release()


def test_a_lock_that_never_was_is_not_held(path: Path) -> None:
    assert not is_held(path)
    assert read_holder(path) is None
