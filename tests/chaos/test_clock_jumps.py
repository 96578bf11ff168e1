"""Row 29: the clock jumps by an hour, forwards and back, during and between processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.chaos.faults import Faults
from tests.chaos.invariants import SERIAL, References, Sandbox, assert_all
from trainable.checkpoint import CheckpointStore
from trainable.store.metrics_file import read_rows

HOUR = 3600


@pytest.mark.chaos
@pytest.mark.fault(29, "the clock jumps by an hour between attempts and during them")
def test_row_29_clock_jumps(
    sandbox: Sandbox, references: References, shim: Path, tmp_path: Path
) -> None:
    faults = Faults(shim, tmp_path, sandbox.cli.root)
    sandbox.cli.environment.update(faults.environment)
    faults.shift_clock(HOUR)
    driver, _ = sandbox.run_to("backward", 8)
    faults.shift_clock(-HOUR)
    sandbox.probe.release("backward-8")
    place = sandbox.probe.hold("backward", 54)
    driver.until_held(place)
    driver.power_off()
    sandbox.probe.release(place)
    # Without this, nothing would have been shown: the times of the first trial do go back.
    times = [row.timestamp_ms / 1000 - time.time() for row in read_rows(sandbox.paths.trial(0))]
    assert max(times) > HOUR / 2
    assert min(times) < -HOUR / 2
    _age_the_newest_checkpoint(sandbox.paths.trial(2))

    place = sandbox.probe.further("forward", 9)
    driver = sandbox.resume()
    driver.until_held(place)
    faults.shift_clock(HOUR)
    sandbox.probe.release(place)
    found = assert_all(sandbox, references.of(SERIAL), driver.wait())
    assert [trial["attempts"] for trial in found.trials] == [1, 1, 2, 1]


def _age_the_newest_checkpoint(trial: Path) -> None:
    """Make the newest generation the one whose files are the oldest."""
    generations = CheckpointStore(trial).generations()
    assert len(generations) > 1
    newest = generations[-1].path
    for path in [newest, *newest.iterdir()]:
        os.utime(path, (time.time() - 9 * HOUR,) * 2)
