"""Row 21: the object store becomes unavailable during an upload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.invariants import (
    SERIAL,
    References,
    Sandbox,
    assert_all,
    assert_ended,
    assert_prints_resume_command,
)
from tests.object_store import BUCKET, ObjectStore, named_by_environment
from trainable.checkpoint import CheckpointStore
from trainable.store.generations import STATE
from trainable.store.objects import files_at

_PREFIX = f"s3://{BUCKET}/sweeps"
_STORED = f'{SERIAL}storage: {{checkpoints: "{_PREFIX}"}}\n'
_BEFORE_A_SAVE, _TRIAL = 47, 2
"""A gradient pass of the serial sweep, and its trial: step 2 is saved, step 4 is next."""


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as made, named_by_environment(made):
        yield made


@pytest.fixture
def sandbox(store: ObjectStore, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "sweep", _STORED, store.environment())
    yield made
    made.close()


@pytest.mark.chaos
@pytest.mark.fault(21, "the store goes away within an upload, and stays away for a while")
def test_row_21_store_lost_during_upload_keeps_commits(
    store: ObjectStore, sandbox: Sandbox, references: References, tmp_path: Path
) -> None:
    driver, _ = sandbox.run_to("backward", _BEFORE_A_SAVE)
    before = _told(sandbox)
    assert before[_TRIAL][0] is not None
    where = f"{_PREFIX}/chaos/trials/000{_TRIAL}/checkpoints"
    store.wire.cut_within_upload(rf"/0+{_TRIAL}/checkpoints/step-0+4-\w+/{STATE}", after=3000)
    sandbox.probe.release(f"backward-{_BEFORE_A_SAVE}")
    assert_prints_resume_command(
        driver.wait(), 3, rf"step 4 \(\d+ bytes\) could not be written to {where}/.*untouched"
    )
    # Nobody says that it is there, that it is damaged, or what the best one is.
    away = rf"^\S+/sweep.yaml:\d+:\d+: storage.checkpoints: {_PREFIX} cannot be listed: "
    assert_ended(sandbox.resume().wait(), 2, away)
    looked = sandbox.cli("best", "chaos")
    assert (looked.returncode, looked.stdout) == (2, "")
    assert "cannot be read" in looked.stderr
    assert "Traceback" not in looked.stderr

    store.wire.mend()
    assert _told(sandbox) == before
    _assert_loads(before)
    found = assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())
    told = [(trial["checkpoint"], trial["best_checkpoint"]) for trial in found.trials]
    _assert_loads(told)
    assert not list(sandbox.paths.directory.glob("trials/*/checkpoints/*"))
    left = {key.rpartition("/")[0] for key in store.objects()}
    kept = {f"s3://{BUCKET}/{place}" for place in left}
    assert {address for pair in told for address in pair} <= kept
    assert all("/step-" in place for place in kept), "no signature of a writer is left"
    assert len(store.objects()) == 2 * len(kept), "each has a state and a manifest"

    sandbox.cli.ok("best", "chaos", "--export", "ours")
    references.sandbox(SERIAL).cli.ok("best", "chaos", "--export", str(tmp_path / "theirs"))
    places = sandbox.directory / "ours", tmp_path / "theirs"
    ours, theirs = (place / "model.safetensors" for place in places)
    assert ours.read_bytes() == theirs.read_bytes()


def _told(sandbox: Sandbox) -> list[tuple[str | None, str | None]]:
    """What `sweep trials` names as the newest and the best checkpoint of each trial."""
    trials = sandbox.cli.json("trials", "chaos")
    return [(trial["checkpoint"], trial["best_checkpoint"]) for trial in trials]


def _assert_loads(told: list[tuple[Any, Any]]) -> None:
    """Whatever is named is there, and has the digest that its manifest says."""
    for address in {address for pair in told for address in pair if address is not None}:
        assert CheckpointStore(Path(), files=files_at(address)).load(address)["progress"]
