"""A sweep's directory of an attacker: inspecting commands end in seconds, name the fault, and
touch nothing else.

`HOSTILE_SWEEPS=10000 pytest tests/unit/sweeps/test_hostile_sweeps.py` tries as many mutations; one
is tried again by its number, which its name says: `HOSTILE_FIRST=4711 HOSTILE_SWEEPS=1`.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from tests.time_limits import scaled
from tests.unit.sweeps.interrupted_sweep import NAME, interrupted

COUNT = int(os.environ.get("HOSTILE_SWEEPS", "20"))
FIRST = int(os.environ.get("HOSTILE_FIRST", "0"))
SECONDS = 5
MOST_BYTES = 1 << 30
COMMANDS = [
    ["list"],
    ["status", "NAME"],
    ["trials", "NAME"],
    ["trials", "NAME", "--json"],
    ["show", "NAME", "0"],
    ["show", "NAME", "0", "--log"],
    ["show", "NAME", "0", "--diff", "1"],
    ["report", "NAME", "--csv", "out"],
    ["best", "NAME"],
    ["compare", "NAME"],
    ["stop", "NAME", "0"],
    ["list", "NAME", "--sizes"],
    ["audit", "NAME"],
    ["list", "NAME", "--remove"],  # measures, and asks a terminal that is not there
]
REPORT, EACH = ["report", "NAME", "--output", "report.html"], 20
"""It draws in a child process, for some seconds: every twentieth mutation is reported."""
_WORDS = [
    b"\x1b]0;owned\x07", b"../../../../etc/passwd", b"!!python/object/apply:os.system ['x']",
    b"\x80\x04c__builtin__\neval\n", b"1e999999", b"-" * 4096, b"9" * 5000, b"\x00" * 64,
    b"{" * 2000, b"[" * 2000, b"&a [*a, *a]", b"http://192.0.2.1:9/x", b"postgresql://192.0.2.1/x",
    b"s3://192.0.2.1/x", "\u202e\u2066".encode(), b"\xff\xfe\xed\xa0\x80", b"NaN", b"null",
    b"true", b"<script>", b"file:///etc/passwd", b"~root", b"\r\n", b"%s%n", b"${HOME}", b"=cmd",
]  # fmt: skip

Mutation = Callable[[bytes, random.Random], bytes]


def _flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 4, 64])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _inserted(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    return content[:place] + draw.choice(_WORDS) + content[place:]


def _replaced(content: bytes, draw: random.Random) -> bytes:
    """One value of the text, or some bytes, in the place of which something else stands."""
    place = draw.randrange(len(content))
    start = max(content.rfind(mark, 0, place) for mark in (b" ", b":", b'"', b"\n", b"\0")) + 1
    found = (content.find(mark, place) for mark in (b" ", b",", b'"', b"\n", b"}", b"\0"))
    ends = [at for at in found if at > 0]
    return content[:start] + draw.choice(_WORDS) + content[min(ends, default=len(content)) :]


def _repeated(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    piece = content[start : start + draw.choice([8, 100, 4096])]
    return content[:start] + piece * draw.choice([2, 100, 2000]) + content[start:]


def _large_number(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(max(1, len(content) - 8))
    number = draw.choice([-1, 2**31 - 1, 2**63 - 1, 0])
    return content[:place] + struct.pack(">q", number) + content[place + 8 :]


def _noise(content: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice([1, 100, len(content)]))


_MUTATIONS: list[Mutation] = [
    _flipped, _cut, _inserted, _replaced, _replaced, _repeated, _large_number, _noise,
]  # fmt: skip


def _poison_table(path: Path, draw: random.Random) -> None:
    """Put a hostile value where a sound database holds another: no digest tells it apart."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = [row[0] for row in found]
        table = draw.choice(tables)
        columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
        value = draw.choice([*_WORDS, 2**62, -1, None, 1e308, "x" * 100_000])
        if isinstance(value, bytes) and draw.random() < 0.8:
            value = value.decode(errors="replace")
        with contextlib.suppress(sqlite3.Error):  # of a column that must be unique, or is checked
            database.execute(f'UPDATE "{table}" SET "{draw.choice(columns)}" = ?', (value,))


def _mutate(directory: Path, draw: random.Random) -> str:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    texts = [path for path in files if path.suffix != ".pt"]
    path = draw.choice(texts if draw.random() < 0.9 else files)
    if path.suffix == ".db" and draw.random() < 0.6:
        with contextlib.suppress(sqlite3.DatabaseError):  # another mutation came before
            _poison_table(path, draw)
        return f"{path.name}: a value"
    mutation = draw.choice(_MUTATIONS)
    path.write_bytes(mutation(path.read_bytes(), draw))
    return f"{path.name}: {mutation.__name__}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Watch:
    """What this process does beside reading, while it is watched."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.seen: list[str] = []
        self.peak = _peak_bytes()
        """Of this process, before the first of these tests."""

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event in ("socket.connect", "socket.getaddrinfo", "os.system", "pickle.find_class"):
            self.seen.append(f"{event} {arguments[1:]}")
        elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
            self.seen.append(f"{event} {arguments[0]}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            place = os.path.realpath(os.fsdecode(path))
            elsewhere = not place.startswith((str(self.inside), "/dev/", "/proc/"))
            if writes and elsewhere and not os.path.isdir(place):  # else a file without a name
                self.seen.append(f"writes to {place}")


@pytest.fixture(scope="module")
def watch() -> Iterator[_Watch]:
    """An audit hook cannot be taken off again: it stays, and hears nothing afterwards."""
    watch = _Watch()
    sys.addaudithook(watch.hear)
    yield watch
    watch.inside = None


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise BaseException(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("number", range(FIRST, FIRST + COUNT))
def test_a_command_that_looks_ends_with_a_sentence(
    tmp_path: Path, watch: _Watch, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(number)
    directory = interrupted(tmp_path / "runs").directory
    monkeypatch.chdir(tmp_path)
    done_to = [_mutate(directory, draw) for _ in range(draw.choice([1, 1, 2]))]
    for command in [*COMMANDS, *([REPORT] if number % EACH == 0 else [])]:
        words = [NAME if word == "NAME" else word for word in command]
        began = time.monotonic()
        watch.inside, watch.seen = tmp_path.resolve(), []
        try:
            with _limited(4 * SECONDS):  # what is slow is told by the clock, what hangs is ended
                done = CliRunner().invoke(app, [*words, "--root", "runs"])
        finally:
            watch.inside = None
        told = f"{done_to}, {words}: {done.output[-2000:]!r}"
        assert done.exception is None or isinstance(done.exception, SystemExit), told
        assert done.exit_code in (0, 2, 3, 4), told
        assert "Traceback" not in done.output, told
        assert "\x1b" not in done.output, told
        assert "\x07" not in done.output, told
        assert done.exit_code == 0 or done.stderr.strip(), told
        if command is REPORT:
            watch.seen = [one for one in watch.seen if one != f"subprocess.Popen {sys.executable}"]
        assert not watch.seen, f"{watch.seen} {told}"
        assert time.monotonic() - began < scaled(3 * SECONDS), told
    assert _peak_bytes() - watch.peak < MOST_BYTES, done_to
