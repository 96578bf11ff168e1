"""The lock: one driver per sweep, its owner named, a dead owner's lock free immediately."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeps.errors import LockLost, LockTaken, SweepLockedError
from sweeps.sweep_lock import SweepLock, describe_foreign_lock, is_held, read_holder

_HOLD = """
import sys, time
from pathlib import Path
from sweeps.sweep_lock import SweepLock
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


def test_second_holder_is_refused_and_first_named(path: Path) -> None:
    with _holder_process(path) as child:
        try:
            assert is_held(path)
            with pytest.raises(SweepLockedError) as refused:
                SweepLock(path).acquire()
            root = path.parent.parent
            assert re.fullmatch(
                rf"sweep 'digits' is already being run by process {child.pid} "
                rf"on {re.escape(socket.gethostname())}; only one driver may run a sweep, "
                r"this one since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; "
                rf"watch it with: sweep status digits --watch --root {re.escape(str(root))}",
                str(refused.value),
            )
        finally:
            child.kill()


_LOOK = """
import sys
from pathlib import Path
from sweeps.sweep_lock import is_held
print("looking", flush=True)
while True:
    is_held(Path(sys.argv[1]))
"""


def test_reading_a_lock_does_not_block_its_owner(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with subprocess.Popen(
        [sys.executable, "-c", _LOOK, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "looking\n"
            for _ in range(300):
                lock = SweepLock(path)
                lock.acquire()
                lock.release()
        finally:
            child.kill()


def test_lock_of_a_killed_holder_is_free(path: Path) -> None:
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


def test_exiting_process_writes_nothing_more(path: Path) -> None:
    lock, passed = SweepLock(path), threading.Event()
    lock.acquire()
    lock.check()
    lock.block_writers()
    threading.Thread(target=lambda: (lock.check(), passed.set()), daemon=True).start()
    assert not passed.wait(0.3)
    lock.release()
    assert not passed.wait(0.1)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"host": "\xff"}', b'{"a": 1}'])
def test_damaged_lock_names_no_holder_and_can_be_taken(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert read_holder(path) is None
    lock = SweepLock(path)
    holder = lock.acquire()
    assert (lock.previous, read_holder(path)) == (None, holder)
    lock.release()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_holder_detects_a_replaced_lock_file(path: Path, how: str) -> None:
    lock = SweepLock(path)
    lock.acquire()
    lock.check()
    path.unlink()
    if how == "replaced":
        other = SweepLock(path)
        other.acquire()
    with pytest.raises(LockLost, match="removed or replaced under this driver"):
        lock.check()
    lock.release()
    if how == "replaced":
        holder = read_holder(path)
        assert holder is not None, "the next holder's name stays"
        other.check()
        other.release()


def test_stopped_holder_keeps_its_lock(path: Path) -> None:
    with _holder_process(path) as child:
        try:
            os.kill(child.pid, signal.SIGSTOP)
            for _ in range(3):
                with pytest.raises(SweepLockedError) as refused:
                    SweepLock(path).acquire()
            assert refused.value.holder is not None
            assert refused.value.holder.pid == child.pid
            os.kill(child.pid, signal.SIGCONT)
            assert is_held(path)
        finally:
            child.kill()


_RACE = """
import sys
from pathlib import Path
from sweeps.sweep_lock import SweepLockedError, SweepLock
sys.stdin.readline()
lock = SweepLock(Path(sys.argv[1]))
try:
    holder = lock.acquire()
except SweepLockedError as held:
    print("refused by", held.holder.pid, flush=True)
else:
    print("held by", holder.pid, flush=True)
    sys.stdin.readline()
"""


def test_one_of_many_drivers_wins_and_others_name_it(path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACE, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        for _ in range(4)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
    said = [racer.stdout.readline().split() for racer in racers if racer.stdout is not None]
    winners = [words[2] for words in said if words[0] == "held"]
    assert len(winners) == 1
    assert [words[2] for words in said if words[0] == "refused"] == winners * 3
    for racer in racers:
        racer.communicate()


def _on(host: str, program: str, path: Path) -> subprocess.Popen[str]:
    """Start a program that sees another hostname, as on another host of a shared path."""
    named = f"import socket; socket.sethostname({host!r})\n{program}"
    root = ["--map-root-user"] if os.getuid() else []
    return subprocess.Popen(
        ["unshare", "--uts", *root, sys.executable, "-c", named, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip


def _may_rename_hosts() -> bool:
    """Whether this machine lets a process have a hostname of its own."""
    if shutil.which("unshare") is None:
        return False
    root = ["--map-root-user"] if os.getuid() else []
    tried = ["unshare", "--uts", *root, "true"]
    return subprocess.run(tried, check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_rename_hosts(), reason="no namespaces for hostnames here")
def test_driver_on_another_host_is_named_until_dead(path: Path) -> None:
    with _on("gpu-1", _HOLD, path) as first, _on("gpu-2", _RACE, path) as second:
        try:
            assert first.stdout is not None
            assert second.stdin is not None
            assert second.stdout is not None
            assert first.stdout.readline() == "held\n"
            with pytest.raises(SweepLockedError, match=rf"process {first.pid} on gpu-1;"):
                SweepLock(path).acquire()
            second.stdin.write("go\n")
            assert second.stdout.readline() == f"refused by {first.pid}\n"
        finally:
            first.kill()
    with _on("gpu-2", _RACE, path) as third:
        assert third.stdin is not None
        assert third.stdout is not None
        third.stdin.write("go\n")
        assert third.stdout.readline() == f"held by {third.pid}\n"
        holder = read_holder(path)
        assert holder is not None
        assert (holder.host, holder.pid) == ("gpu-2", third.pid)
        third.communicate()
    assert not is_held(path)


@pytest.mark.parametrize(
    "token", ["", "0123", "../../home/ada", 7, None, "x" * 32], ids=lambda token: f"{token!r}"
)
def test_invalid_token_names_no_holder(path: Path, token: object) -> None:
    """Processes end by it: an empty one would mean all that are this user's."""
    path.parent.mkdir()
    path.write_text(json.dumps({"host": "a", "pid": 1, "started": 0.0, "token": token}))
    assert read_holder(path) is None
    lock = SweepLock(path)
    lock.acquire()
    assert lock.previous is None
    lock.release()


def test_lock_written_by_another_user_ends_no_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    told = {"host": "a", "pid": 1, "started": 0.0, "token": "0123456789abcdef" * 2}
    path.write_text(json.dumps(told))
    owner = path.stat().st_uid
    for user, believed in ((owner + 1, None), (owner, told["token"])):
        path.write_text(json.dumps(told))
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        lock = SweepLock(path)
        lock.acquire()
        assert (lock.previous and lock.previous.token) == believed
        lock.release()


@pytest.mark.parametrize("earlier", [None, 0o644, 0o666])
def test_only_its_owner_can_open_a_lock(path: Path, earlier: int | None) -> None:
    """Who can open it can lock it, for reading too, and so keep its owner from running."""
    before = os.umask(0)
    try:
        if earlier is not None:  # of an earlier release
            path.parent.mkdir()
            path.touch()
            path.chmod(earlier)
        lock = SweepLock(path)
        lock.acquire()
        mode = path.stat().st_mode & 0o777
        lock.release()
        assert mode == 0o600
    finally:
        os.umask(before)


def _locked_by_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[str]:
    """A process that has locked the file; this machine says that another user started it."""
    path.parent.mkdir(exist_ok=True)
    path.touch()
    program = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); "
    program += "print('locked', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    theirs = os.stat

    def stat(name: Any, **options: Any) -> Any:
        found = theirs(name, **options)
        if name != f"/proc/{other.pid}":
            return found
        return SimpleNamespace(st_uid=found.st_uid + 4711)

    monkeypatch.setattr(os, "stat", stat)
    return other


def test_non_driver_that_locks_a_sweep_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _locked_by_another(path, monkeypatch) as other:
        assert not is_held(path)
        with pytest.raises(LockTaken) as refused:
            SweepLock(path).acquire()
        told = describe_foreign_lock(path)
        assert str(refused.value) == told
        assert told is not None
        assert f"{path} is locked by process {other.pid} of user" in told
        assert told.endswith(f": rm {path}")
        path.unlink()  # as it says
        lock = SweepLock(path)
        lock.acquire()
        assert is_held(path)
        lock.release()
        other.communicate()


def test_unreadable_lock_is_seen_as_held(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = SweepLock(path)
    lock.acquire()

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("sweeps.sweep_lock.open_regular", refuse)
        patched.setattr("trainable.store.regular_files.open_regular", refuse)
        assert is_held(path)
        assert read_holder(path) is None
    lock.release()
    with monkeypatch.context() as patched:
        patched.setattr("sweeps.sweep_lock.open_regular", refuse)
        assert not is_held(path)
