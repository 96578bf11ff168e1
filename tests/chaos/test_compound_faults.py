"""Row 34: three random faults in sequence.

`CHAOS_COMPOUND=200 make chaos` runs 200 cases. One is replayed by its seed, which its name says:
`CHAOS_SEED=20261127 CHAOS_COMPOUND=1 make chaos CHAOS=row_34`. A fault counts when it was really
played, and all of a case must have been: each comes at a pass that is still to be trained, and a
checkpoint is damaged only once there is another one to fall back on.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.invariants import (
    SERIAL,
    Driver,
    Outcome,
    References,
    Sandbox,
    assert_all,
    assert_ended,
    assert_prints_resume_command,
)
from tests.chaos.kill_cases import SEED
from tests.chaos.probe_task import KINDS
from trainable.checkpoint import CheckpointStore
from trainable.store.generations import STATE

CASES, FAULTS, SLICE = int(os.environ.get("CHAOS_COMPOUND", "12")), 3, 1
_PAGE = 4096
_FURTHER = 3
"""Passes after which it is looked again whether there is something to damage."""


class Case:
    """A sweep to which one thing after the other happens.

    Args:
        sandbox: Where it is.
        reference: Says how many passes there are.
        seed: Decides what happens, and where.
    """

    def __init__(self, sandbox: Sandbox, reference: Outcome, seed: int) -> None:
        self._sandbox = sandbox
        self._reference = reference
        self._draw = random.Random(seed)
        self._driver: Driver | None = None
        self.played: list[str] = []
        """The faults that hit, in words."""

    def play(self) -> None:
        """Let everything happen, and go on to the sweep's end."""
        faults: list[Callable[[Driver, int, str], None]] = [
            self._kill_worker,
            self._kill_driver,
            self._power_off,
            self._interrupt,
            self._terminate,
            self._stop,
            self._stand_still,
            self._damage,
        ]
        for number in range(FAULTS):
            if self._driver is None:
                exists = self._sandbox.paths.exists()
                self._driver = self._sandbox.resume() if exists else self._sandbox.run()
            self._at_a_pass(self._draw.choice(faults), FAULTS - number)
        ended = self._driver.wait() if self._driver else self._sandbox.resume_to_end()
        assert_all(self._sandbox, self._reference, ended)
        assert len(self.played) == FAULTS, self.played

    def _at_a_pass(self, fault: Callable[[Driver, int, str], None], faults_left: int) -> None:
        driver, probe = self._driver, self._sandbox.probe
        assert driver is not None
        # Passes that were done again count twice, so at least as many as this are still to come.
        left = {kind: self._reference.passes[kind] - probe.count(kind) for kind in KINDS}
        kind = self._draw.choice([kind for kind in KINDS if left[kind] > 0])
        place = probe.further(kind, self._draw.randint(1, -(-left[kind] // faults_left)))
        worker = driver.until_held(place)
        while fault == self._damage and not self._with_two_generations():
            before, place = place, probe.further("backward", _FURTHER)
            probe.release(before)
            worker = driver.until_held(place)
        print(f"{place}: {fault.__name__}")
        fault(driver, worker, place)
        self.played.append(f"{fault.__name__} at {place}")

    def _kill_worker(self, driver: Driver, worker: int, place: str) -> None:
        del driver
        os.kill(worker, signal.SIGKILL)
        self._sandbox.probe.release(place)

    def _kill_driver(self, driver: Driver, worker: int, place: str) -> None:
        del worker
        driver.kill()
        self._sandbox.probe.release(place)
        self._driver = None

    def _power_off(self, driver: Driver, worker: int, place: str) -> None:
        del worker
        driver.power_off()
        self._sandbox.probe.release(place)
        self._driver = None

    def _interrupt(self, driver: Driver, worker: int, place: str) -> None:
        self._signal(driver, signal.SIGINT, worker, place)

    def _terminate(self, driver: Driver, worker: int, place: str) -> None:
        self._signal(driver, signal.SIGTERM, worker, place)

    def _signal(self, driver: Driver, number: int, worker: int, place: str) -> None:
        del worker
        driver.send(number)
        self._sandbox.probe.release(place)
        assert_prints_resume_command(driver.wait(), 128 + number)
        self._driver = None

    def _stop(self, driver: Driver, worker: int, place: str) -> None:
        """`sweep stop` from another terminal; the trial is held until the driver has heard it: all
        that is left to train may take less time than that.
        """
        del worker
        stop = self._sandbox.start("stop", self._sandbox.paths.name)
        stop.until(self._sandbox.paths.drain.exists)
        self._sandbox.probe.release(place)
        assert_ended(stop.wait(), 0)
        assert_prints_resume_command(driver.wait(), 130)
        self._driver = None

    def _stand_still(self, driver: Driver, worker: int, place: str) -> None:
        stopped = self._draw.choice([[worker], [driver.pid], [driver.pid, worker]])
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        self._sandbox.probe.release(place)
        time.sleep(self._draw.uniform(0.1, 3.0))
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    def _damage(self, driver: Driver, worker: int, place: str) -> None:
        """The power goes off, and the newest checkpoint of each trial in training is damaged by
        it; the one before it is sound.
        """
        trials = self._with_two_generations()
        self._power_off(driver, worker, place)
        for directory in trials:
            file = CheckpointStore(directory).generations()[-1].path / STATE
            sound = file.read_bytes()
            damaged = bytearray(sound)
            where = self._draw.randrange(len(sound))
            kind = self._draw.choice(["bit", "cut", "page"])
            if kind == "cut":
                del damaged[where:]
            elif kind == "page":
                damaged[where : where + _PAGE] = bytes(len(damaged[where : where + _PAGE]))
            if damaged == sound:  # a bit is asked for, or that page was zeros already
                damaged[where] ^= 1 << self._draw.randrange(8)
            file.write_bytes(damaged)
            print(f"damaged {file}: {kind} at {where}")

    def _with_two_generations(self) -> list[Path]:
        """The directories of trials that have no end yet and could fall back."""
        trials = self._sandbox.cli.json("trials", self._sandbox.paths.name)
        unfinished = [t["number"] for t in trials if t["state"] in ("running", "waiting")]
        found = [self._sandbox.paths.trial(number) for number in unfinished]
        return [path for path in found if len(CheckpointStore(path).generations()) > 1]


_SLICE = list(range(SEED, SEED + SLICE))
_MORE = [pytest.param(seed, marks=pytest.mark.chaos) for seed in range(SEED + SLICE, SEED + CASES)]


@pytest.mark.chaos
@pytest.mark.fault(34, f"three faults one after the other, {max(CASES, SLICE)} times")
@pytest.mark.parametrize("seed", [*_SLICE, *_MORE])
def test_row_34_compound_faults(sandbox: Sandbox, references: References, seed: int) -> None:
    Case(sandbox, references.of(SERIAL), seed).play()
