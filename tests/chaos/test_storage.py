"""Rows 11 to 14 of the fault matrix: the storage is full, read-only or damaged."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.lock import is_held
from tests.chaos.faults import Faults
from tests.chaos.harness import SERIAL, References, Sandbox, Template, assert_all
from trainable.checkpoint import CheckpointStore

CHECKPOINTS, LEDGER, OUTBOX = "*/checkpoints/*", "*/ledger.db*", "*/outbox/*"


@pytest.fixture
def storage(shim: Path, tmp_path: Path) -> Faults:
    """Faults of the sandbox's root."""
    return Faults(shim, tmp_path, tmp_path / "sweep" / "runs")


@pytest.fixture
def sandbox(storage: Faults, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "sweep", SERIAL, storage.environment)
    yield made
    made.close()


@pytest.mark.chaos
@pytest.mark.fault(11, "the disk is full while a checkpoint, the ledger or the outbox is written")
@pytest.mark.parametrize("place", [CHECKPOINTS, LEDGER, OUTBOX])
def test_row_11_disk_full_leaves_old_data_and_names_path_and_bytes(
    storage: Faults, sandbox: Sandbox, references: References, place: str
) -> None:
    driver = sandbox.run()
    driver.until(lambda: sandbox.probe.count("backward") > 40)
    storage.fill(0, match=place)
    ended = driver.wait()
    assert ended.code in (2, 3), ended.text  # 2: the ledger, as whenever it cannot be used
    assert "sweep resume chaos" in ended.last_line, ended.text
    cause = next(line for line in ended.text.splitlines() if "full" in line or "No space" in line)
    assert place.strip("*/").split("/")[0] in cause, ended.text
    assert "bytes" in cause, ended.text
    assert "Traceback" not in ended.text, ended.text
    storage.clear()
    assert_all(sandbox, references.of(SERIAL), sandbox.go_on())


@pytest.mark.fault(12, "the storage refuses from the start")
@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_row_12_sweep_refuses_before_any_trial_where_it_cannot_write(
    storage: Faults, sandbox: Sandbox, error: int
) -> None:
    storage.fail(error)
    ended = sandbox.run().wait()
    assert ended.code == 2, ended.text
    assert str(sandbox.cli.root) in ended.text
    assert os.strerror(error) in ended.text
    assert "Traceback" not in ended.text
    assert not sandbox.probe.count("forward")
    assert not sandbox.cli.root.exists()


@pytest.mark.chaos
@pytest.mark.fault(12, "the storage becomes read-only in the middle")
def test_row_12_storage_that_becomes_read_only_never_holds_what_is_reported_as_saved(
    storage: Faults, sandbox: Sandbox, references: References
) -> None:
    driver = sandbox.run()
    driver.until(lambda: sandbox.probe.count("backward") > 40)
    before = _generations(sandbox)
    storage.fail(errno.EROFS, match=CHECKPOINTS)
    ended = driver.wait()
    assert ended.code not in (0, 2), ended.text
    assert "Read-only file system" in ended.text
    assert "sweep resume chaos" in ended.last_line
    storage.clear()
    told = {
        trial["number"]: Path(trial["checkpoint"]).name
        for trial in sandbox.cli.json("trials", "chaos")
        if trial["checkpoint"]
    }
    for number, name in told.items():
        newest = CheckpointStore(sandbox.paths.trial(number)).newest()
        assert newest is not None
        assert newest.path.name == name
    assert before.keys() <= told.keys()
    assert_all(sandbox, references.of(SERIAL), sandbox.go_on())


@pytest.mark.chaos
@pytest.mark.fault(13, "a flipped bit, a cut, a page of zeros in the newest checkpoint")
@pytest.mark.parametrize("damage", ["flipped", "truncated", "zeroed"])
def test_row_13_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(
    interrupted: Template, references: References, damage: str
) -> None:
    sandbox = interrupted.fresh()
    path = Path(next(reversed(_generations(sandbox).values())))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if damage == "flipped":
        content[middle] ^= 8
    elif damage == "truncated":
        del content[middle:]
    else:
        content[middle : middle + 4096] = bytes(len(content[middle : middle + 4096]))
    path.write_bytes(content)
    assert_all(sandbox, references.of(SERIAL), sandbox.go_on())
    quarantine = path.parents[1] / "quarantine"
    assert [p.name for p in quarantine.iterdir()] == [path.parent.name]


@pytest.mark.chaos
@pytest.mark.fault(14, "every checkpoint of a trial is damaged")
def test_row_14_trial_whose_checkpoints_are_all_damaged_names_them_and_never_starts_anew(
    interrupted: Template,
) -> None:
    sandbox = interrupted.fresh()
    newest = Path(next(reversed(_generations(sandbox).values())))
    damaged = sorted(newest.parents[1].glob("step-*/state.pt"))
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 8
        path.write_bytes(content)
    number = int(newest.parents[2].name)
    ended = sandbox.go_on()
    (trial,) = [t for t in sandbox.cli.json("trials", "chaos") if t["number"] == number]
    assert trial["state"] == "failed", ended.text
    for path in damaged:
        assert str(path) in trial["reason"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() in trial["reason"]
    assert sorted(newest.parents[1].glob("step-*/state.pt")) == damaged
    assert not is_held(sandbox.paths.lock)


def _generations(sandbox: Sandbox) -> dict[int, str]:
    """The newest state file of each trial that has one."""
    found = {}
    for directory in sorted(sandbox.paths.directory.glob("trials/*")):
        saved = CheckpointStore(directory).generations()
        if saved:
            found[int(directory.name)] = str(saved[-1].path / "state.pt")
    return found
