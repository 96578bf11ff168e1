"""A sweep's directory with any file damaged: each command works or names the damage.

Nothing here goes on with such a sweep: its task is nowhere to be found, so that a resume is
refused before anything is started, if the damage does not refuse it first.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.run.doctor import check_sweeps
from sweeps.run.sync import queue_interruptions
from sweeps.spec.revisions import read_spec
from tests.message_parts import assert_parts
from tests.unit.sweeps.interrupted_sweep import FILES, interrupted
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox import Outbox
from tracking.outbox_status import read_outbox
from trainable.store.metrics_file import read_rows

Damage = Callable[[Path, random.Random], None]

DIRECTORIES = ["control", "outbox", "trials", "trials/0000", "trials/0000/checkpoints"]
COMMANDS = [
    ["list"],
    ["status", "chaos"],
    ["trials", "chaos"],
    ["show", "chaos", "0"],
    ["best", "chaos"],
    ["compare", "chaos"],
    ["stop", "chaos", "--now"],
    ["resume", "chaos"],
]

WRITING = [["report", "chaos"], ["best", "chaos", "--export", "exported"], ["sync", "chaos"]]


def _empty(path: Path, _draw: random.Random) -> None:
    path.write_bytes(b"")


def _remove(path: Path, _draw: random.Random) -> None:
    path.unlink()


def _cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(1, len(content))])


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _scribble(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(200))


def _replace_by_a_directory(path: Path, _draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _gone(path: Path, _draw: random.Random) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _replace_by_a_file(path: Path, _draw: random.Random) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.write_bytes(b"no such thing")


RARER = [_cut, _scribble, _replace_by_a_directory]
DAMAGES = [_empty, _remove, _flip, *(pytest.param(one, marks=pytest.mark.chaos) for one in RARER)]


def _files(directory: Path) -> dict[Path, bytes]:
    # SQLite's own files come and go beside a database that is looked at.
    return {
        path: path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal", "-journal"))
    }


def _check_commands(root: Path) -> None:
    before = _files(root)
    for command in COMMANDS:
        done = CliRunner().invoke(app, [*command, "--root", str(root)])
        what = f"{command}: {done.exit_code} {done.exception!r}\n{done.output}"
        assert done.exception is None or isinstance(done.exception, SystemExit), what
        assert done.exit_code in ({2} if command[0] in ("stop", "resume") else {0, 2, 3}), what
        assert bool(done.stdout) == (done.exit_code == 0), what
        # a sentence says of what it speaks; the raw error of a library does not
        assert done.exit_code == 0 or re.search("chaos|probe_task", done.stderr), what
        assert "Traceback" not in done.output, what
    check_sweeps(root)  # the doctor's look at them; what it finds is told, not raised
    assert _files(root) == before


def _check_damaged(directory: Path, file: str, damage: Damage, seed: str) -> None:
    root = directory / "runs"
    interrupted(root)
    damage(root / "chaos" / file, random.Random(seed))
    _check_commands(root)
    shutil.rmtree(root)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__[1:])
@pytest.mark.parametrize("file", FILES)
def test_each_command_works_or_names_the_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, damage: Damage
) -> None:
    monkeypatch.chdir(tmp_path)
    _check_damaged(tmp_path, file, damage, f"{file} {damage.__name__}")


@pytest.mark.parametrize("damage", [_gone, _replace_by_a_file])
@pytest.mark.parametrize("directory", DIRECTORIES)
def test_each_command_works_or_names_the_damaged_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str, damage: Damage
) -> None:
    monkeypatch.chdir(tmp_path)
    _check_damaged(tmp_path, directory, damage, directory)


@pytest.mark.chaos
@pytest.mark.parametrize("damage", [_remove, _flip, _replace_by_a_directory])
@pytest.mark.parametrize("file", FILES)
def test_writing_commands_work_or_name_the_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, damage: Damage
) -> None:
    monkeypatch.chdir(tmp_path)
    interrupted(tmp_path / "runs")
    damage(tmp_path / "runs/chaos" / file, random.Random(f"{file} {damage.__name__}"))
    for command in WRITING:
        done = CliRunner().invoke(app, command)
        what = f"{command}: {done.exit_code} {done.exception!r}\n{done.output}"
        assert done.exception is None or isinstance(done.exception, SystemExit), what
        assert done.exit_code in (0, 2, 3), what
        assert done.exit_code == 0 or re.search("chaos|probe_task", done.stderr), what
        assert "Traceback" not in done.output, what
        assert (command[0] != "best") or (tmp_path / "exported").exists() == (done.exit_code == 0)


@pytest.mark.parametrize("file", ["sweep.yaml", "ledger.db"])
def test_list_names_a_damaged_sweep_and_shows_others(tmp_path: Path, file: str) -> None:
    interrupted(tmp_path)
    (tmp_path / "chaos" / file).write_bytes(b"no such thing")
    MadeSweep(tmp_path, "small")
    done = CliRunner().invoke(app, ["list", "--json", "--root", str(tmp_path)])
    assert done.exit_code == 0
    assert [sweep["name"] for sweep in json.loads(done.stdout)] == ["small"]
    assert str(tmp_path / "chaos" / file) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_damaged_outbox_does_not_prevent_inspection(tmp_path: Path) -> None:
    interrupted(tmp_path)
    outbox = tmp_path / "chaos/outbox/outbox.db"
    outbox.write_bytes(b"no such thing")
    done = CliRunner().invoke(app, ["status", "chaos", "--json", "--root", str(tmp_path)])
    assert (done.exit_code, json.loads(done.stdout)["trials"]["complete"]) == (0, 1)
    assert_parts(done.stderr, f"outbox {outbox} is damaged (file is not a database);", "resume")


def test_damaged_outbox_is_set_aside_and_rebuilt(tmp_path: Path) -> None:
    paths = interrupted(tmp_path)
    (paths.outbox / "outbox.db").write_bytes(b"no such thing")
    spec = read_spec(paths.spec).spec
    queue_interruptions(paths, spec)
    known = read_outbox(paths.outbox)
    assert known.damage is None
    assert known.tracked_statuses == {0: "FINISHED", 1: "FINISHED"}
    for number, steps in ((0, 15), (1, 5)):
        rows = read_rows(paths.trial(number))
        assert len(rows) == steps
        outbox = Outbox(paths.outbox)
        batch = outbox.next_batch(number)
        assert batch is not None
        assert [point.step for point in batch.points if point.key == "train/loss"] == [
            row.step for row in rows
        ]
        outbox.close()
