"""Rows 15, 16, 26, 30 and 50: the spec, a database or the data is damaged, locked or changed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sweeps.ledger.ledger import Ledger
from sweeps.ledger.sqlite import WAIT_SECONDS
from sweeps.spec.revisions import read_spec, write_spec
from tests.chaos.invariants import (
    SERIAL,
    References,
    Sandbox,
    Template,
    assert_all,
    assert_ended,
    assert_prints_resume_command,
)
from tests.chaos.kill_cases import SEED
from tests.lock_reader import NOBODY, reader
from tests.specs import with_overrides
from trainable.checkpoint import CheckpointStore

_NO_REVISION = "sweep.yaml has no valid revision of the spec"
_NUM_REPORTS = "SELECT COUNT(*) FROM trial_intermediate_values"
_FOR_A_WHILE = 3.0


def _flip(content: bytes) -> bytes:
    draw = random.Random(SEED)
    changed = bytearray(content)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(content: bytes) -> bytes:
    return content[: random.Random(SEED).randrange(1, len(content))]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated": _cut,
    "flipped": _flip,
}


@pytest.mark.chaos
@pytest.mark.fault(15, "the spec's file empty, truncated, with a flipped bit")
def test_row_15_spec_damaged(references: References, interrupted: Template) -> None:
    sandbox = interrupted.fresh()
    whole, ledger = sandbox.paths.spec.read_bytes(), sandbox.paths.ledger.read_bytes()
    for damage in DAMAGES.values():
        sandbox.paths.spec.write_bytes(damage(whole))
        damaged = sandbox.paths.spec.read_bytes()
        assert_ended(sandbox.resume().wait(), 2, _NO_REVISION)
        if not damaged:  # what looks most like a sweep that is not there
            assert_ended(sandbox.run().wait(), 2, "sweep 'chaos' exists already")
        assert sandbox.paths.spec.read_bytes() == damaged
        assert sandbox.paths.ledger.read_bytes() == ledger
    sandbox.paths.spec.unlink()
    assert_ended(sandbox.run().wait(), 2, r"sweep\.yaml is gone, but .* holds trials")
    assert sandbox.paths.ledger.read_bytes() == ledger
    sandbox.paths.spec.write_bytes(whole)
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(15, "the newest revision of the spec's file damaged")
def test_row_15_newest_revision_damaged(references: References, interrupted: Template) -> None:
    sandbox = interrupted.fresh()
    first = read_spec(sandbox.paths.spec).spec
    whole = sandbox.paths.spec.read_bytes()
    write_spec(sandbox.paths.spec, with_overrides(first, ["trials=6"]))
    appended = sandbox.paths.spec.read_bytes()[len(whole) :]
    sandbox.paths.spec.write_bytes(whole + appended[: len(appended) // 2])
    ended = sandbox.resume_to_end()
    assert "what follows revision 1 cannot be used" in ended.text
    assert_all(sandbox, references.of(SERIAL), ended)


@pytest.mark.fault(16, "the ledger damaged: cut, a page zeroed, empty")
def test_row_16_ledger_damaged(references: References, interrupted: Template) -> None:
    sandbox = interrupted.fresh()
    path = sandbox.paths.ledger
    completed = [t.number for t in Ledger.open(path).trials() if t.finished]
    assert completed == [0, 1]
    before = _kept(sandbox, completed)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], bytes(4096) + whole[4096:], b""):
        path.write_bytes(damaged)
        assert_ended(
            sandbox.resume().wait(), 2, rf"{path.name} is not a readable ledger: .*backup"
        )
        assert path.read_bytes() == damaged
        assert _kept(sandbox, completed) == before
    path.write_bytes(whole)
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


def _kept(sandbox: Sandbox, numbers: list[int]) -> dict[Path, bytes]:
    """The curves and every file of the checkpoints of some trials."""
    found = {}
    for number in numbers:
        directory = sandbox.paths.trial(number)
        saved = [path for path in directory.glob("checkpoints/**/*") if path.is_file()]
        assert saved
        for path in [directory / "metrics.jsonl", *saved]:
            found[path] = path.read_bytes()
    return found


@pytest.mark.chaos
@pytest.mark.fault(16, "another process holds the ledger while trials train")
def test_row_16_ledger_locked(references: References, sandbox: Sandbox) -> None:
    driver, _ = sandbox.run_to("forward", 20)
    with contextlib.closing(sqlite3.connect(sandbox.paths.ledger, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        sandbox.probe.release("forward-20")
        ended = driver.wait(3 * WAIT_SECONDS)
        assert_prints_resume_command(ended, 4, r"process \d+ has locked the ledger .* for 30 s")
        other.execute("ROLLBACK")
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(16, "another process holds the ledger for a while")
def test_row_16_ledger_locked_for_a_while(references: References, sandbox: Sandbox) -> None:
    store = CheckpointStore(sandbox.paths.trial(0))
    driver, _ = sandbox.run_to("forward", 20)
    driver.until(lambda: "trial 0 epoch 1" in driver.text)  # which is shown once it is written
    with contextlib.closing(sqlite3.connect(sandbox.paths.ledger, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        sandbox.probe.release("forward-20")
        driver.until(lambda: any(g.epoch == 2 for g in store.generations()))
        # The worker goes on, while what it told waits to be written.
        driver.until(lambda: sandbox.probe.count("forward") > 20)
        until = time.monotonic() + _FOR_A_WHILE
        driver.until(lambda: time.monotonic() >= until)
        (num_reports,) = other.execute(_NUM_REPORTS).fetchone()
        assert num_reports == 1
        assert "trial 0 epoch 2" not in driver.text
        assert not sandbox.paths.trial(1).exists(), "a trial is in the ledger before it begins"
        assert driver.running
        other.execute("ROLLBACK")
    assert_all(sandbox, references.of(SERIAL), driver.wait())


@pytest.mark.fault(26, "the data set missing before the run")
def test_row_26_data_missing(sandbox: Sandbox) -> None:
    task, data = sandbox.directory / "probe_task.py", sandbox.directory / "samples.pt"
    reading = f"def build_data(self) -> Data:\n        torch.load({str(data)!r})\n"
    task.write_text(task.read_text().replace("def build_data(self) -> Data:\n", reading))
    assert_ended(sandbox.run().wait(), 2, f"No such file or directory: .*{re.escape(str(data))}")
    assert not sandbox.cli.root.exists()
    assert not sandbox.probe.count("backward")


@pytest.mark.chaos
@pytest.mark.fault(26, "the data set changed before a resume")
def test_row_26_data_changed(references: References, interrupted: Template) -> None:
    sandbox = interrupted.fresh()
    task = sandbox.directory / "probe_task.py"
    before = task.read_text()
    task.write_text(before.replace("manual_seed(5)", "manual_seed(6)"))
    difference = (
        r"data [0-9a-f]{12} -> [0-9a-f]{12}; what the task builds differs in train: tensor 0.*; "
        r"trials before and after could not be compared"
    )
    assert_ended(sandbox.resume().wait(), 2, difference)
    task.write_text(before)
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(30, "code or configuration changed before a resume")
def test_row_30_changed_before_resume(references: References, interrupted: Template) -> None:
    sandbox = interrupted.fresh()
    task, spec = sandbox.directory / "probe_task.py", sandbox.paths.spec.read_bytes()
    before = task.read_text()
    task.write_text(before + "\n# changed\n")
    changed = r"probe_task\.py [0-9a-f]{12} -> [0-9a-f]{12}; .* --accept-changes"
    assert_ended(sandbox.resume().wait(), 2, changed)
    task.write_text(before)
    assert_ended(sandbox.resume("-s", "seed=8").wait(), 2, r"seed 7 -> 8; .* --accept-changes")
    assert_ended(sandbox.resume("-s", "mode=max").wait(), 2, "mode is min .* cannot become max")
    assert sandbox.paths.spec.read_bytes() == spec
    task.write_text(before + "\n# changed\n")
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end("--accept-changes"))


_READER = NOBODY if os.geteuid() == 0 else os.geteuid()
"""Only root can be another user; else another process of this one is the reader."""


@pytest.mark.chaos
@pytest.mark.fault(50, "another user cannot open a database of a sweep with the default modes")
def test_row_50_reader_of_a_private_sweep(references: References, sandbox: Sandbox) -> None:
    driver, _ = sandbox.run_to("forward", 20)
    files = [path for path in sandbox.cli.root.rglob("*") if re.search(r"\.db(-\w+)?$", path.name)]
    assert {"ledger.db", "outbox.db"} <= {path.name for path in files}
    for path in files:
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o077 == 0
        if _READER == NOBODY:
            with pytest.raises(PermissionError), reader(path, NOBODY):
                pass
    sandbox.probe.release("forward-20")
    assert_all(sandbox, references.of(SERIAL), driver.wait())


@pytest.mark.chaos
@pytest.mark.fault(50, "another user, who may only read, locks the ledger or the outbox")
@pytest.mark.parametrize(("name", "code"), [("ledger.db", 4), ("outbox.db-shm", 3)])
def test_row_50_reader_of_a_shared_sweep(
    references: References, sandbox: Sandbox, name: str, code: int
) -> None:
    sandbox.cli.environment["SWEEP_UMASK"] = "022"
    driver, _ = sandbox.run_to("forward", 20)
    [path] = sandbox.paths.directory.rglob(name)
    with reader(path, _READER) as pid:
        sandbox.probe.release("forward-20")
        ended = driver.wait(5 * WAIT_SECONDS)
        who = rf"process {pid} of user \w+" if _READER == NOBODY else f"process {pid}"
        assert_prints_resume_command(ended, code, rf"{who} has locked the (ledger|outbox) .* then")
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())
