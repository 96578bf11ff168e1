"""Row 6: kill the driver at any point of its life."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.chaos.invariants import (
    PARALLEL,
    SERIAL,
    Outcome,
    References,
    Sandbox,
    assert_all,
)
from tests.chaos.kill_cases import SEED
from tests.chaos.probe_task import KINDS
from tests.integration.commandline import wait_until
from trainable.checkpoint import CheckpointStore

SWEEPS, KILLS_OF_EACH = 10, 5
_TRIES = 4


def _over_in(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def _kill_driver(
    sandbox: Sandbox, reference: Outcome, draw: random.Random, kind: str, share: float
) -> int:
    """Start the sweep or go on with it, and kill the driver.

    Where it had ended before that time of its life, the next one is killed: also a driver that
    finds nothing more to do dies while it looks.

    Args:
        sandbox: Where the sweep is.
        reference: Says how long a driver lives and how many passes there are.
        draw: Chooses among the passes.
        kind: `time`, or the kind of the pass at which the driver is killed.
        share: For `time`: of a driver's life.

    Returns:
        How many drivers died of SIGKILL: 1, or 0 when all of them ended before.
    """
    life = reference.seconds
    for _ in range(_TRIES):
        left = reference.passes[kind] - sandbox.probe.count(kind) if kind != "time" else 0
        driver, place = sandbox.resume() if sandbox.paths.exists() else sandbox.run(), ""
        if left > 0:  # as many are still to come, or more: some were done twice
            place = sandbox.probe.further(kind, draw.randint(1, left))
            driver.until_held(place)
        else:
            driver.until(_over_in(share * life), unless_ended=False)
        if driver.running:
            driver.send(signal.SIGKILL)
        ended = driver.wait()
        where = place or f"{share:.2f} of its life"
        print(f"ended with {ended.code} at {where}; it had said {ended.last_line!r}")
        if place:
            sandbox.probe.release(place)
        if ended.code == -signal.SIGKILL:
            return 1
        life = min(life, ended.seconds)  # the next one has less to do
        share *= 0.8  # one that has little to do ends before its last tenth can be hit
    return 0


@pytest.mark.fault(6, "kill -9 of the driver while it starts, trains, and delivers")
def test_row_06_driver_killed(sandbox: Sandbox, references: References) -> None:
    reference, draw = references.of(SERIAL), random.Random(SEED)
    kills = _kill_driver(sandbox, reference, draw, "time", draw.uniform(0.1, 0.6))
    kills += _kill_driver(sandbox, reference, draw, "forward", 0)
    kills += _kill_driver(sandbox, reference, draw, "time", draw.uniform(0.75, 0.95))
    assert kills == 3
    found = assert_all(sandbox, reference, sandbox.resume_to_end())
    assert {trial["state"] for trial in found.trials} == {"complete", "pruned"}


@pytest.mark.chaos
@pytest.mark.fault(6, f"kill -9 of the driver at {SWEEPS * KILLS_OF_EACH} random points")
@pytest.mark.parametrize("seed", range(SEED, SEED + SWEEPS))
def test_row_06_driver_killed_at_random_points(
    sandbox: Sandbox, references: References, seed: int
) -> None:
    reference, draw = references.of(SERIAL), random.Random(seed)
    kills = 0
    for _ in range(KILLS_OF_EACH):
        kind = draw.choice(["time", "time", *KINDS])
        kills += _kill_driver(sandbox, reference, draw, kind, draw.random())
    assert kills == KILLS_OF_EACH, "every sweep has its share of the fifty"
    assert_all(sandbox, reference, sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(6, "kill -9 of the driver before it hears of an epoch that is saved")
@pytest.mark.parametrize("epoch", [4, 5, 10], ids=["stopped early", "goes on", "the last"])
def test_row_06_driver_killed_before_it_heard(
    sandbox: Sandbox, references: References, epoch: int
) -> None:
    reference = references.of(SERIAL)
    assert [t["epoch"] for t in reference.trials] == [3, 1, 3, 3]  # what the numbers stand for
    driver, _ = sandbox.run_to("validation", epoch)
    driver.send(signal.SIGSTOP)
    sandbox.probe.release(f"validation-{epoch}")
    number, of_trial = {4: (1, 1), 5: (2, 1), 10: (3, 3)}[epoch]
    store = CheckpointStore(sandbox.paths.trial(number))
    wait_until(lambda: [g for g in store.generations() if g.epoch == of_trial])
    assert driver.kill().code == -signal.SIGKILL
    assert_all(sandbox, reference, sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(6, "the same where two trials run at once")
@pytest.mark.parametrize("sandbox", [PARALLEL], indirect=True, ids=["parallel"])
def test_row_06_driver_killed_with_two_trials(sandbox: Sandbox, references: References) -> None:
    reference, draw = references.of(PARALLEL), random.Random(SEED)
    kills = _kill_driver(sandbox, reference, draw, "forward", 0)
    kills += _kill_driver(sandbox, reference, draw, "validation", 0)
    assert kills == 2
    assert_all(sandbox, reference, sandbox.resume_to_end())
