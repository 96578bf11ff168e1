"""Rows 11 to 14 of the fault matrix: the storage is full, read-only or damaged."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sweeps.ledger.ledger import Ledger
from sweeps.ledger.trials import TrialRecord
from tests.chaos.faults import Faults
from tests.chaos.invariants import (
    SERIAL,
    Driver,
    References,
    Sandbox,
    Template,
    assert_all,
    assert_ended,
    assert_prints_resume_command,
)
from tests.chaos.sandbox import INTERVAL, MICRO_BATCHES, STEPS
from tests.integration.commandline import wait_until
from trainable.checkpoint import CheckpointStore

CHECKPOINTS, LEDGER, OUTBOX = "*/checkpoints/*", "*/ledger.db*", "*/outbox/*"
_BEFORE_A_SAVE, _TRIAL = 47, 2
"""A gradient pass of the serial sweep, and its trial: step 2 is saved, step 4 is next."""


@pytest.fixture
def storage(shim: Path, tmp_path: Path) -> Faults:
    """Faults of the sandbox's root."""
    return Faults(shim, tmp_path, tmp_path / "sweep" / "runs")


@pytest.fixture
def sandbox(storage: Faults, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "sweep", SERIAL, storage.environment)
    yield made
    made.close()


def _run_to_before_a_save(sandbox: Sandbox) -> Driver:
    """Hold the third trial where nothing is being written."""
    driver, _ = sandbox.run_to("backward", _BEFORE_A_SAVE)
    room = sandbox.paths.trial(_TRIAL) / "checkpoints"
    wait_until(lambda: [p.name for p in room.glob("step-*")] == [f"step-{INTERVAL:08d}"])
    wait_until(lambda: not list(room.glob(".writing-*/*")))
    return driver


def _untimed(trial: TrialRecord) -> TrialRecord:
    """Without how long workers trained it, which the driver still stores as it ends."""
    return replace(trial, seconds=None, cpu_seconds=None, gpu_seconds=None)


@pytest.mark.chaos
@pytest.mark.fault(11, "the disk is full while a checkpoint, the ledger or the outbox is written")
@pytest.mark.parametrize("place", [CHECKPOINTS, LEDGER, OUTBOX])
def test_row_11_disk_full_keeps_data_and_names_path(
    storage: Faults, sandbox: Sandbox, references: References, place: str
) -> None:
    driver = _run_to_before_a_save(sandbox)
    paths = sandbox.paths
    # The ledger hears of a start a moment after the worker.
    wait_until(lambda: Ledger.open(paths.ledger).trial(_TRIAL).attempts == 1)
    saved, ledger = _generations(sandbox), paths.ledger.read_bytes()
    told = Ledger.open(paths.ledger).trials()
    storage.fill(0, match=place)
    sandbox.probe.release(f"backward-{_BEFORE_A_SAVE}")
    ended = driver.wait()
    where, said = {
        CHECKPOINTS: (paths.trial(_TRIAL) / "checkpoints", r"\(\d+ bytes\) could not be written"),
        LEDGER: (paths.ledger, r"\d+ bytes are free on that disk"),
        OUTBOX: (paths.outbox, r"\d+ bytes are free on that disk"),
    }[place]
    path = re.escape(str(where))
    assert_prints_resume_command(ended, 3, rf"{path}.*{said}|{said}.*{path}")

    after = _generations(sandbox)
    if place == CHECKPOINTS:
        assert after == saved
    else:  # the trial went on to its report; what is neither among its newest nor its best goes
        ours = str(paths.trial(_TRIAL))
        kept = {path: content for path, content in saved.items() if not path.startswith(ours)}
        still = {path: content for path, content in saved.items() if path in after}
        assert (kept | still).items() <= after.items()
    if place == LEDGER:
        assert paths.ledger.read_bytes() == ledger
    known = Ledger.open(paths.ledger).trials()
    if place != OUTBOX:  # told before the outbox is
        assert [*map(_untimed, known)] == [*map(_untimed, told)]
    assert [t for t in known if t.finished] == [t for t in told if t.finished]
    storage.clear()
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.fault(12, "the storage refuses from the start")
@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_row_12_unwritable_storage_is_refused_at_start(
    storage: Faults, sandbox: Sandbox, error: int
) -> None:
    storage.fail(error)
    ended = sandbox.run().wait()
    assert ended.code == 2, ended.text
    assert str(sandbox.cli.root) in ended.text
    assert os.strerror(error) in ended.text
    assert "Traceback" not in ended.text
    assert not sandbox.probe.count("backward")
    assert not sandbox.cli.root.exists()


@pytest.mark.chaos
@pytest.mark.fault(12, "the storage becomes read-only in the middle")
@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_row_12_read_only_storage_holds_only_reported_saves(
    storage: Faults, sandbox: Sandbox, references: References, error: int
) -> None:
    driver = _run_to_before_a_save(sandbox)
    saved, told = _generations(sandbox), _told(sandbox)
    printed = driver.text
    storage.fail(error, match=CHECKPOINTS)
    sandbox.probe.release(f"backward-{_BEFORE_A_SAVE}")
    ended = driver.wait()
    assert_prints_resume_command(ended, 3, rf"^stopped: .*{os.strerror(error)}")
    assert _generations(sandbox) == saved
    assert _told(sandbox) == told
    since = ended.text.removeprefix(printed)
    assert not re.search(r"\bsaved\b", since), since
    assert not re.search(rf"trial {_TRIAL} (epoch|complete|pruned)", since), since
    assert Ledger.open(sandbox.paths.ledger).trial(_TRIAL).reports == {}
    storage.clear()
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(12, "all of the sweep's directory becomes read-only in the middle")
def test_row_12_read_only_sweep_stays_unchanged(
    storage: Faults, sandbox: Sandbox, references: References
) -> None:
    driver = _run_to_before_a_save(sandbox)
    printed = driver.text
    storage.fail(errno.EROFS, match=f"{sandbox.paths.name}/*")
    before = _files(sandbox)
    sandbox.probe.release(f"backward-{_BEFORE_A_SAVE}")
    ended = driver.wait()
    assert_prints_resume_command(
        ended, 3, rf"^stopped: .*{re.escape(str(sandbox.paths.directory))}"
    )
    assert _files(sandbox) == before
    since = ended.text.removeprefix(printed)
    assert not re.search(r"^(?!stopped: ).*\bsaved\b", since, re.MULTILINE), since
    assert not re.search(rf"trial {_TRIAL} (epoch|complete|pruned)", since), since
    storage.clear()
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(13, "a flipped bit, a cut, a page of zeros in the newest checkpoint")
@pytest.mark.parametrize("damage", ["flipped", "truncated", "zeroed"])
def test_row_13_damaged_checkpoint_falls_back_to_previous(
    interrupted: Template, references: References, damage: str
) -> None:
    sandbox = interrupted.fresh()
    path = _states(sandbox, _TRIAL)[-1]
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if damage == "flipped":
        content[middle] ^= 8
    elif damage == "truncated":
        del content[middle:]
    else:
        content[middle : middle + 4096] = bytes(len(content[middle : middle + 4096]))
    path.write_bytes(content)
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())
    quarantine = path.parents[1] / "quarantine"
    assert [p.name for p in quarantine.iterdir()] == [path.parent.name]


@pytest.mark.fault(14, "every checkpoint of a trial is damaged")
def test_row_14_trial_with_no_sound_checkpoint_fails(
    interrupted: Template, references: References
) -> None:
    sandbox = interrupted.fresh()
    damaged, curve = _states(sandbox, _TRIAL), sandbox.paths.trial(_TRIAL) / "metrics.jsonl"
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 8
        path.write_bytes(content)
    rows, passes = curve.read_bytes(), sandbox.probe.count("backward")

    ended = sandbox.resume_to_end()
    assert_ended(ended, 0, rf"^trial {_TRIAL} failed.*: checkpoint: every checkpoint below")
    assert ended.last_line == "try more: sweep resume chaos -s trials=8"
    # What is suggested after this trial and stopped because of it is another sweep's.
    found = assert_all(sandbox, references.of(SERIAL), only=(0, 1))
    assert len(found.trials) == 4
    assert found.trials[_TRIAL]["state"] == "failed"
    for path in damaged:
        assert str(path) in found.trials[_TRIAL]["reason"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() in found.trials[_TRIAL]["reason"]
    assert _states(sandbox, _TRIAL) == damaged
    assert curve.read_bytes() == rows
    per_epoch = STEPS // 3 * MICRO_BATCHES
    assert sandbox.probe.count("backward") - passes == found.trials[3]["epoch"] * per_epoch


def _states(sandbox: Sandbox, number: int) -> list[Path]:
    """The state files of a trial's generations, oldest first."""
    saved = CheckpointStore(sandbox.paths.trial(number)).generations()
    assert saved
    return [generation.path / "state.pt" for generation in saved]


def _generations(sandbox: Sandbox) -> dict[str, str]:
    """The digest of every file of every generation, by its path."""
    files = sandbox.paths.directory.glob("trials/*/checkpoints/step-*/*")
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _files(sandbox: Sandbox) -> dict[str, str]:
    """The digest of every file of the sweep: ledger, outbox, curves, checkpoints, logs.

    Not of what SQLite shares between processes, which is memory: a mapped file without content
    that lasts.
    """
    files = [path for path in sandbox.paths.directory.rglob("*") if path.is_file()]
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.endswith(".db-shm")
    }


def _told(sandbox: Sandbox) -> list[tuple[str | None, str | None]]:
    """What `sweep trials` names as the newest and the best checkpoint of each trial."""
    trials = sandbox.cli.json("trials", sandbox.paths.name)
    return [(trial["checkpoint"], trial["best_checkpoint"]) for trial in trials]
