"""Rows 2 and 33 with whole sweeps: kill a worker before each persisting call of a save; resume a
sweep after a power loss.

`test_crash_points.py` does the same to each piece alone, at every call. What must not live
here: how calls are recorded and stopped (`faults.py`), what a power loss leaves (`power_loss.py`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.faults import Faults, Kind, Operation
from tests.chaos.invariants import SERIAL, References, Sandbox, assert_all
from tests.chaos.power_loss import FATES, Disk, Fate
from tests.chaos.sandbox import INTERVAL
from tests.integration.commandline import wait_until
from trainable.checkpoint import CheckpointStore

CHECKPOINTS = "*/checkpoints*"
ONE = SERIAL.replace("trials: 4", "trials: 1")
_BEFORE_A_SAVE = 9
"""A gradient pass: steps 2 and 4 are saved, step 5 is next, which ends the epoch."""
_CALLS = 23
"""What a save makes, with the removal of what is no longer kept; and one more."""
_CUTS = (-0.5, 0.1, 0.4, 0.7, 0.95)
"""Where the power goes off: shares of the calls since the trial began; below 0, before it."""
_SAVED = re.compile(r"(?P<room>.*/checkpoints)/step-(?P<step>\d+)(\.\d+)?")


@pytest.mark.chaos
@pytest.mark.fault(2, "kill -9 of a worker before each persisting call of a save")
@pytest.mark.parametrize("index", range(_CALLS))
def test_row_02_worker_killed_at_each_call_of_a_save(
    shim: Path, tmp_path: Path, references: References, index: int
) -> None:
    storage = Faults(shim, tmp_path, tmp_path / "sweep" / "runs")
    sandbox = Sandbox(tmp_path / "sweep", ONE, storage.environment)
    try:
        driver, _ = sandbox.run_to("backward", _BEFORE_A_SAVE)
        room = sandbox.paths.trial(0) / "checkpoints"
        saved = {f"step-{step:08d}" for step in (INTERVAL, 2 * INTERVAL)}
        wait_until(lambda: {path.name for path in room.glob("step-*")} == saved)
        wait_until(lambda: not list(room.glob(".writing-*/*")))
        storage.record(match=CHECKPOINTS)
        storage.kill_before(index, match=CHECKPOINTS)
        sandbox.probe.release(f"backward-{_BEFORE_A_SAVE}")
        found = assert_all(sandbox, references.of(ONE), driver.wait())
        assert [trial["attempts"] for trial in found.trials] == [2], "nobody was killed"
        before = [operation for operation in storage.operations() if operation.index < index]
        print("\n".join(["killed after:", *map(str, before)]))
        assert len(before) == index
        if index == _CALLS - 1:
            assert before[-1].kind is Kind.RMDIR, "a whole save makes more calls, or fewer"
    finally:
        sandbox.close()


@dataclass(frozen=True)
class Recorded:
    """A sweep that has run to its end, and every call by which it persisted something."""

    sandbox: Sandbox
    operations: Sequence[Operation]

    def index(self, share: float) -> int:
        """Where a share of all calls has been made."""
        every = enumerate(self.operations)
        begun = next(index for index, o in every if o.path.endswith("/checkpoints"))
        length = begun if share < 0 else len(self.operations) - begun
        return begun + int(share * length)

    def lose_power(self, index: int, fate: Fate) -> None:
        """Put in the root's place what is left when the power goes off before a call."""
        self.sandbox.close()
        root = self.sandbox.cli.root
        if root.exists():
            shutil.rmtree(root)
        disk = Disk()
        disk.apply(self.operations[:index])
        disk.write(root, fate)

    def acknowledged(self, index: int) -> int:
        """The step of the newest generation that was committed before a call: its directory's
        rename was synced.
        """
        renamed = step = 0
        for operation in self.operations[:index]:
            if operation.kind is Kind.RENAME and (saved := _SAVED.fullmatch(operation.other)):
                renamed = int(saved["step"])
            elif operation.kind is Kind.SYNC and operation.path.endswith("/checkpoints"):
                step = renamed
        return step


@pytest.fixture(scope="module")
def recorded(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    directory = tmp_path_factory.mktemp("recorded")
    storage = Faults(shim, directory, directory / "sweep" / "runs")
    storage.record(contents=True)
    sandbox = Sandbox(directory / "sweep", ONE, storage.environment)
    try:
        ended = sandbox.run().wait()
        assert ended.code == 0, ended.text
        for name in storage.environment:
            del sandbox.cli.environment[name]
        # What Ray keeps is never read again.
        ray = str(sandbox.paths.ray.relative_to(sandbox.cli.root))
        operations = [o for o in storage.operations() if not o.path.startswith(ray)]
        yield Recorded(sandbox, operations)
    finally:
        sandbox.close()


@pytest.mark.chaos
@pytest.mark.fault(33, "the power goes off in a sweep; what was not synced has four fates")
@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("share", _CUTS)
def test_row_33_power_loss_in_a_sweep(
    recorded: Recorded, references: References, share: float, fate: Fate
) -> None:
    sandbox, index = recorded.sandbox, recorded.index(share)
    recorded.lose_power(index, fate)
    print(f"power lost before call {index} of {len(recorded.operations)}, {fate}")
    newest = CheckpointStore(sandbox.paths.trial(0)).newest()
    assert (newest.step if newest else 0) >= recorded.acknowledged(index)
    assert_all(sandbox, references.of(ONE), sandbox.resume_to_end())
