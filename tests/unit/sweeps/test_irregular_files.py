"""Irregular or huge files in a sweep's directory: each command ends quickly and names the file,
without a traceback.

What must not live here: regular files with other content (`test_damaged_sweeps`), and files that
are gone (`test_missing_files`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.run.doctor import check_sweeps
from sweeps.sweep_lock import SweepLock
from tests.slices import sliced
from tests.time_limits import scaled
from tests.unit.sweeps.interrupted_sweep import CHECKPOINT, interrupted
from tracking.outbox import Outbox
from tracking.outbox_status import read_outbox
from trainable.processes.trial_log import TrialLog
from trainable.store.regular_files import UNLIMITED, IrregularFile, open_regular

RUN = "trials/0000"
FILES = [
    "lock",
    "sweep.yaml",
    "ledger.db",
    "ledger.db-wal",
    "ledger.db-journal",
    "outbox/outbox.db",
    "outbox/outbox.db-wal",
    f"{CHECKPOINT}/manifest.json",
    f"{CHECKPOINT}/state.pt",
    f"{RUN}/config.yaml",
    f"{RUN}/metrics.jsonl",
    f"{RUN}/logged.jsonl",
    f"{RUN}/resumed.json",
    f"{RUN}/built.json",
    f"{RUN}/trial.log",
    "control",
    "control/heartbeat-0000",
]
NEEDED = ("lock", "sweep.yaml", "ledger.db", "ledger.db-wal", "ledger.db-journal")
"""Without these a sweep cannot be looked at."""
COMMANDS = [
    ["list"],
    ["status", "chaos"],
    ["trials", "chaos", "--json"],
    ["show", "chaos", "0"],
    ["best", "chaos"],
    ["compare", "chaos"],
    ["stop", "chaos", "--now"],
    ["resume", "chaos"],
]
_SECONDS = 5.0


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


def _directory(path: Path) -> None:
    path.mkdir()


def _link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_a_fifo(path: Path) -> None:
    elsewhere = Path("elsewhere").absolute()
    os.mkfifo(elsewhere)
    path.symlink_to(elsewhere)


def _link_to_a_file(path: Path) -> None:
    elsewhere = Path("elsewhere").absolute()
    elsewhere.write_text("somebody's own\n")
    path.symlink_to(elsewhere)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS = [_fifo, _socket, _directory, _link_to_a_device, _link_to_a_fifo, _link_to_a_file, _sparse]


@contextlib.contextmanager
def _no_longer_than(seconds: float, path: Path) -> Iterator[None]:
    """Fail after so long, also where a thread waits for the other end of a FIFO."""

    def late(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            ends.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        raise TimeoutError(f"more than {seconds:g} s")

    ends: list[int] = []
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for end in ends:
            os.close(end)


def _place(directory: Path, file: str, make: Callable[[Path], None]) -> Path:
    path = directory / file
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    make(path)
    return path


def _runs(case: tuple[str, Callable[[Path], None]]) -> bool:
    """Two kinds for each file, so that each kind stands in the place of several files."""
    file, make = FILES.index(case[0]), KINDS.index(case[1])
    return (make - file) % len(KINDS) in (0, 3)


@pytest.mark.parametrize(
    ("file", "make"),
    sliced(itertools.product(FILES, KINDS), _runs),
    ids=lambda value: value if isinstance(value, str) else value.__name__[1:],
)
def test_each_command_ends_quickly_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    interrupted(root)
    path = _place(root / "chaos", file, make)
    kind = stat.S_IFMT(path.lstat().st_mode)
    for command in COMMANDS:
        started = time.monotonic()
        with _no_longer_than(scaled(2 * _SECONDS), path):
            done = CliRunner().invoke(app, [*command, "--root", str(root)])
        what = f"{command}: {done.exit_code} {done.exception!r}\n{done.output}"
        assert time.monotonic() - started < scaled(_SECONDS), what
        assert done.exception is None or isinstance(done.exception, SystemExit), what
        assert done.exit_code in (0, 2, 3), what
        assert "Traceback" not in done.output, what
        assert done.exit_code == 0 or "chaos" in done.stderr or "probe_task" in done.stderr, what
        if command == ["status", "chaos"] and file in NEEDED and make is not _link_to_a_file:
            assert done.exit_code == 2, what
            assert f"{root}/chaos/{file}" in done.stderr.replace("\n", ""), what
    with _no_longer_than(_SECONDS, path):
        check_sweeps(root)
    assert stat.S_IFMT(path.lstat().st_mode) == kind
    if (elsewhere := tmp_path / "elsewhere").is_file():
        assert elsewhere.read_text() == "somebody's own\n"


@pytest.mark.parametrize("make", KINDS[:-1], ids=lambda make: make.__name__[1:])
@pytest.mark.parametrize("suffix", ["", "-wal", "-journal"])
def test_irregular_outbox_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    interrupted(tmp_path / "runs").outbox.rename("outbox")
    path = _place(tmp_path, f"outbox/outbox.db{suffix}", make)
    with _no_longer_than(_SECONDS, path):
        outbox = Outbox(Path("outbox"))
        outbox.append(0, "tags", {"a": "b"})
        outbox.close()
    assert outbox.moved_aside is not None
    assert read_outbox(Path("outbox")).pending == 1
    if (elsewhere := tmp_path / "elsewhere").is_file():
        assert elsewhere.read_text() == "somebody's own\n"


@pytest.mark.parametrize("make", KINDS[:-1], ids=lambda make: make.__name__[1:])
def test_irregular_files_are_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    """A log, a curve and a lock are opened to be written; a link leads none of them elsewhere."""
    monkeypatch.chdir(tmp_path)
    path = _place(tmp_path, "file", make)
    lock = SweepLock(path)
    opening: list[Callable[[], object]] = [
        lambda: TrialLog(path),
        lambda: open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, limit=UNLIMITED),
        lock.acquire,
    ]
    for opened in opening:
        with _no_longer_than(_SECONDS, path), pytest.raises(IrregularFile, match=str(path)):
            opened()
    if (elsewhere := tmp_path / "elsewhere").is_file():
        assert elsewhere.read_text() == "somebody's own\n"


def test_ledger_and_state_may_be_linked_to_another_disk(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    interrupted(root)
    for file in ("ledger.db", f"{CHECKPOINT}/state.pt"):
        moved = tmp_path / Path(file).name
        (root / "chaos" / file).rename(moved)
        (root / "chaos" / file).symlink_to(moved)
    done = CliRunner().invoke(app, ["show", "chaos", "0", "--json", "--root", str(root)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["checkpoint"].endswith("step-00000015")
