"""Row 34: three faults, one after the other, drawn from a seed.

`CHAOS_CASES=200 make chaos` runs 200 cases. One is replayed by its seed, which its name says:
`CHAOS_SEED=20261127 CHAOS_CASES=1 make chaos CHAOS=row_34`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.chaos.cases import SEED
from tests.chaos.harness import (
    SERIAL,
    Driver,
    Outcome,
    References,
    Sandbox,
    assert_all,
    assert_ended,
    assert_says_how_to_go_on,
)
from tests.chaos.probe_task import KINDS
from trainable.checkpoint import CheckpointStore
from trainable.manifest import STATE

CASES, FAULTS, SLICE = int(os.environ.get("CHAOS_CASES", "12")), 3, 1
_PAGE = 4096


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
        ended = self._driver.wait() if self._driver else self._sandbox.go_on()
        assert_all(self._sandbox, self._reference, ended)

    def _at_a_pass(self, fault: Callable[[Driver, int, str], None], faults_left: int) -> None:
        driver, probe, kind = self._driver, self._sandbox.probe, self._draw.choice(KINDS)
        assert driver is not None
        left = max(1, self._reference.passes[kind] - probe.count(kind))
        place = probe.further(kind, self._draw.randint(1, -(-left // faults_left)))
        driver.until(lambda: probe.held(place), unless_ended=False)
        worker = probe.held(place)
        print(f"{place}: {fault.__name__} {'' if worker else '(the sweep had ended before)'}")
        if worker is None:
            probe.let_go(place)
        else:
            fault(driver, worker, place)

    def _kill_worker(self, driver: Driver, worker: int, place: str) -> None:
        del driver
        os.kill(worker, signal.SIGKILL)
        self._sandbox.probe.let_go(place)

    def _kill_driver(self, driver: Driver, worker: int, place: str) -> None:
        del worker
        driver.kill()
        self._sandbox.probe.let_go(place)
        self._driver = None

    def _power_off(self, driver: Driver, worker: int, place: str) -> None:
        del worker
        driver.power_off()
        self._sandbox.probe.let_go(place)
        self._driver = None

    def _interrupt(self, driver: Driver, worker: int, place: str) -> None:
        self._signal(driver, signal.SIGINT, worker, place)

    def _terminate(self, driver: Driver, worker: int, place: str) -> None:
        self._signal(driver, signal.SIGTERM, worker, place)

    def _signal(self, driver: Driver, number: int, worker: int, place: str) -> None:
        del worker
        driver.send(number)
        self._sandbox.probe.let_go(place)
        assert_says_how_to_go_on(driver.wait(), 128 + number)
        self._driver = None

    def _stop(self, driver: Driver, worker: int, place: str) -> None:
        """`sweep stop` from another terminal; asked while the trial is held."""
        del worker
        control = self._sandbox.paths.control
        stop = self._sandbox.start("stop", self._sandbox.paths.name)
        stop.until(lambda: any(control.iterdir()) if control.is_dir() else False)
        self._sandbox.probe.let_go(place)
        assert_ended(stop.wait(), 0)
        assert_says_how_to_go_on(driver.wait(), 130)
        self._driver = None

    def _stand_still(self, driver: Driver, worker: int, place: str) -> None:
        stopped = self._draw.choice([[worker], [driver.pid], [driver.pid, worker]])
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        self._sandbox.probe.let_go(place)
        time.sleep(self._draw.uniform(0.1, 3.0))
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    def _damage(self, driver: Driver, worker: int, place: str) -> None:
        """The power goes off, and the newest checkpoint of a trial in training is damaged by it;
        the one before it is sound.
        """
        self._power_off(driver, worker, place)
        ended = {t["number"] for t in self._trials() if t["state"] not in ("running", "waiting")}
        for directory in sorted((self._sandbox.paths.directory / "trials").iterdir()):
            generations = CheckpointStore(directory).generations()
            if int(directory.name) in ended or len(generations) < 2:
                continue
            file = generations[-1].path / STATE
            content = bytearray(file.read_bytes())
            where = self._draw.randrange(len(content))
            match self._draw.choice(["bit", "cut", "page"]):
                case "bit":
                    content[where] ^= 1 << self._draw.randrange(8)
                case "cut":
                    del content[where:]
                case "page":
                    content[where : where + _PAGE] = bytes(len(content[where : where + _PAGE]))
            file.write_bytes(content)
            print(f"damaged {file}")

    def _trials(self) -> list[dict[str, object]]:
        return list(self._sandbox.cli.json("trials", self._sandbox.paths.name))


@pytest.mark.fault(34, "three faults one after the other; the slice of it")
@pytest.mark.parametrize("seed", range(SEED, SEED + SLICE))
def test_row_34_compound_faults(sandbox: Sandbox, references: References, seed: int) -> None:
    Case(sandbox, references.of(SERIAL), seed).play()


@pytest.mark.chaos
@pytest.mark.fault(34, f"three faults one after the other, {CASES} times")
@pytest.mark.parametrize("seed", range(SEED + SLICE, SEED + CASES))
def test_row_34_compound_faults_many(sandbox: Sandbox, references: References, seed: int) -> None:
    Case(sandbox, references.of(SERIAL), seed).play()
