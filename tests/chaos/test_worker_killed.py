"""Row 1: kill the process that trains a trial."""

from __future__ import annotations

import os
import signal

import pytest

from tests.chaos.invariants import (
    PARALLEL,
    SERIAL,
    Ended,
    Outcome,
    References,
    Sandbox,
    assert_all,
)
from tests.chaos.sandbox import INTERVAL, MICRO_BATCHES

# In the computation of a gradient; between two micro-batches of a step; between two batches of an
# evaluation. Each is counted from the previous death on.
PLACES = (("backward", 9), ("forward", 26), ("validation", 4))
_SAVING = "trials/*/checkpoints/.writing-*/new-*"
MORE_PLACES = (
    *(("forward", 4), ("validation", 2), ("backward", 15), ("forward", 26)),
    *(("backward", 20), ("validation", 3)),
)


def _kill_workers(sandbox: Sandbox, places: tuple[tuple[str, int], ...]) -> Ended:
    """Run the sweep to its end, and kill whoever comes to one of the places."""
    place = sandbox.probe.further(*places[0])
    driver = sandbox.run()
    for following in [*places[1:], None]:
        worker = driver.until_held(place)
        # How long a save takes beside the training is the disk's affair, and not counted here.
        driver.until(lambda: not list(sandbox.paths.directory.glob(_SAVING)))
        os.kill(worker, signal.SIGKILL)
        sandbox.probe.release(place)
        place = sandbox.probe.further(*following) if following else ""
    return driver.wait()


def _assert_little_was_redone(found: Outcome, reference: Outcome, *, deaths: int) -> None:
    """At most a checkpoint interval for each death, counted by the task itself."""
    redone = found.passes["forward"] - reference.passes["forward"]
    allowed = deaths * INTERVAL * MICRO_BATCHES
    assert 0 < redone <= allowed, f"{redone} passes were redone, {allowed} may be"
    assert sum(t["attempts"] for t in found.trials) == len(found.trials) + deaths


@pytest.mark.fault(1, "kill -9 of a trial in a step, in an accumulation, in an evaluation")
def test_row_01_worker_killed(sandbox: Sandbox, references: References) -> None:
    reference = references.of(SERIAL)
    found = assert_all(sandbox, reference, _kill_workers(sandbox, PLACES))
    _assert_little_was_redone(found, reference, deaths=len(PLACES))


@pytest.mark.chaos
@pytest.mark.fault(1, "the same where two trials run at once")
@pytest.mark.parametrize("sandbox", [PARALLEL], indirect=True, ids=["parallel"])
def test_row_01_workers_killed_side_by_side(sandbox: Sandbox, references: References) -> None:
    reference = references.of(PARALLEL)
    found = assert_all(sandbox, reference, _kill_workers(sandbox, MORE_PLACES))
    _assert_little_was_redone(found, reference, deaths=len(MORE_PLACES))
