"""The fault injection itself: it sees every persisting call and injects the requested fault."""

from __future__ import annotations

import errno
import filecmp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.faults import Faults, Kind
from tests.chaos.power_loss import Disk
from tests.time_limits import scaled

# Everything that Python and SQLite use, by every way that leads there.
PROGRAM = """
import os, pathlib, shutil, sqlite3, sys, time
root = pathlib.Path(sys.argv[1])
(root / "a" / "b").mkdir(parents=True)
(root / "a" / "text").write_text("first")
(root / "a" / "text").write_text("second")
with open(root / "log", "ab") as log:
    log.write(b"one"); log.flush(); os.fsync(log.fileno()); log.write(b"two")
with open(root / "log", "r+b") as log:
    log.seek(1); log.write(b"X"); log.truncate(4)
shutil.copyfile(root / "log", root / "copy")
os.writev(os.open(root / "parts", os.O_CREAT | os.O_WRONLY), [b"ab", b"cd"])
os.replace(root / "copy", root / "a" / "moved")
here = os.open(root, os.O_RDONLY)
os.fsync(here)
os.rename("parts", "a/parts", src_dir_fd=here, dst_dir_fd=here)
os.unlink("log", dir_fd=here)
shutil.copytree(root / "a", root / "c")
shutil.rmtree(root / "a")
os.chdir(root)
open("relative", "w").write("x")
for mode in ("wal", "delete"):
    db = sqlite3.connect(root / (mode + ".db"), isolation_level=None)
    db.execute("PRAGMA journal_mode = " + mode)
    db.execute("CREATE TABLE t (x)")
    for i in range(50):
        db.execute("INSERT INTO t VALUES (?)", ("x" * 1000,))
    db.execute("DELETE FROM t WHERE rowid > 5")
    db.execute("VACUUM")
if os.fork() == 0:
    open("child", "w").write("y")
    os._exit(0)
os.wait()
print(time.time())
"""


def _run(faults: Faults, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", program, *map(str, arguments)],
        env={**os.environ, **faults.environment},
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


def _differences(first: Path, second: Path) -> list[str]:
    compared = filecmp.dircmp(first, second)
    found = [*compared.left_only, *compared.right_only]
    both = ((name, first / name, second / name) for name in compared.common_files)
    found += [name for name, one, other in both if one.read_bytes() != other.read_bytes()]
    for name in compared.common_dirs:
        found += _differences(first / name, second / name)
    return found


def test_directory_is_rebuilt_from_its_record(faults: Faults, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    faults.record(contents=True)
    done = _run(faults, PROGRAM, root)
    assert done.returncode == 0, done.stderr
    disk, operations = Disk(), faults.operations()
    disk.apply(operations)
    disk.write(tmp_path / "rebuilt", "kept")
    assert _differences(root, tmp_path / "rebuilt") == []
    assert {o.kind for o in operations} == set(Kind) - {Kind.OPEN, Kind.ACCESS}
    assert [o.index for o in operations] == list(range(faults.count))
    assert len({o.pid for o in operations}) == 2


def test_unsynced_data_and_names_may_be_lost(faults: Faults, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    program = """
import os, sys
os.chdir(sys.argv[1])
def sync(path):
    os.fsync(os.open(path, os.O_RDONLY))
for name in ("named", "unnamed", "unsynced"):
    open(name, "w").write(name)
for name in ("named", "unnamed"):
    sync(name)
    if name == "named": sync(".")
os.rename("unnamed", "renamed")
"""
    faults.record(contents=True)
    _run(faults, program, root)
    disk = Disk()
    disk.apply(faults.operations())
    found = {}
    for fate in ("kept", "dropped", "torn", "unnamed"):
        disk.write(tmp_path / fate, fate)
        found[fate] = {path.name: path.read_text() for path in (tmp_path / fate).iterdir()}
    whole = {"named": "named", "renamed": "unnamed", "unsynced": "unsynced"}
    assert found == {
        "kept": whole,
        "dropped": {"named": "named", "unnamed": "unnamed", "unsynced": ""},
        "torn": whole | {"unsynced": "unsy\0\0\0\0"},
        "unnamed": {"named": "named", "unnamed": "unnamed", "unsynced": "unsynced"},
    }


def test_process_dies_before_each_indexed_call(faults: Faults, tmp_path: Path) -> None:
    program = "import sys; f = open(sys.argv[1], 'wb', 0); [f.write(b'x') for _ in range(3)]"
    path = tmp_path / "runs" / "file"
    path.parent.mkdir()
    for index, left in enumerate([None, b"", b"x", b"xx"]):
        path.unlink(missing_ok=True)
        faults.kill_before(index)
        assert _run(faults, program, path).returncode == -signal.SIGKILL
        assert (path.read_bytes() if path.exists() else None) == left
    path.unlink()
    faults.kill_before(4)
    assert _run(faults, program, path).returncode == 0
    assert faults.count == 4


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (errno.ENOSPC, "open write mkdir"),
        (errno.EROFS, "open write mkdir unlink rename access"),
        (errno.EACCES, "open mkdir unlink rename access"),
        (errno.EIO, "write fsync"),
    ],
)
def test_calls_fail_with_kernel_errors(
    faults: Faults, tmp_path: Path, error: int, refused: str
) -> None:
    program = """
import os, sys
os.chdir(sys.argv[1])
file = os.open("open", os.O_RDWR | os.O_CREAT)
open("old", "w").close(); open("gone", "w").close()
input()
def access():
    if not os.access("old", os.W_OK): raise OSError
for name, act in {
    "access": access,
    "open": lambda: open("new", "w").close(),
    "write": lambda: os.write(file, b"x"),
    "fsync": lambda: os.fsync(file),
    "mkdir": lambda: os.mkdir("directory"),
    "unlink": lambda: os.unlink("gone"),
    "rename": lambda: os.rename("old", "renamed"),
}.items():
    try: act()
    except OSError as problem: print(name)
"""
    (tmp_path / "runs").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program, str(tmp_path / "runs")],
        env={**os.environ, **faults.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while faults.count < 3:  # what is armed now meets a process that is running already
        assert process.poll() is None
    faults.fail(error)
    assert set(process.communicate("go\n", timeout=scaled(60))[0].split()) == set(refused.split())


def test_disk_fills_in_mid_write_and_can_be_freed(faults: Faults, tmp_path: Path) -> None:
    program = """
import os, sys
print(os.write(os.open(sys.argv[1], os.O_CREAT | os.O_RDWR), b"x" * 100))
"""
    path = tmp_path / "runs" / "trials" / "state.pt"
    path.parent.mkdir(parents=True)
    faults.fill(60, match="trials/*")
    assert _run(faults, program, path).stdout.strip() == "60"
    assert _run(faults, program, path).stdout.strip() == "60"  # what is there is written over
    assert "No space left" in _run(faults, program, path.with_name("more")).stderr
    assert _run(faults, program, tmp_path / "runs" / "elsewhere").stdout.strip() == "100"
    faults.clear()
    assert _run(faults, program, path).stdout.strip() == "100"


def test_clock_is_shifted_for_python(faults: Faults) -> None:
    program = "import time; print(time.time(), time.time_ns() / 1e9, time.monotonic())"
    before = time.monotonic()
    faults.shift_clock(-3600)
    wall, wall_ns, monotonic = map(float, _run(faults, program).stdout.split())
    assert abs(wall - time.time() + 3600) < 60
    assert abs(wall_ns - wall) < 1
    assert before < monotonic < time.monotonic()
