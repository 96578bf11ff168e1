"""P7: what ten kills cost at the default checkpoint interval, and how soon training goes on.

What must not live here: whether the results are right (`tests/chaos`); here it is only asserted
that they are the same bits.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path

import psutil

from tests.bench.table import Goal, Result, alone, paired
from tests.chaos.invariants import References, Sandbox, Template, assert_all
from tests.chaos.kill_cases import SEED

# The digits example's size: 24 trials of 10 epochs, a checkpoint after each.
_SPEC = """
name: chaos
task: probe_task:Probe
metric: val/loss
mode: min
trials: 24
seed: 7
budget: {epochs: 10}
concurrency: 2
space: {train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}}
search: {sampler: random}
train: {batch_size: 12}
"""
_KILLS = 10
_GOAL = Goal("ratio", 1 / 0.95)


def recovery(repeats: int) -> list[Result]:
    """Steps executed for each useful one under ten kills, five of a trial and five of the driver;
    seconds from `sweep resume` to the first step.
    """
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        place = Path(directory)
        reference = References(place).of(_SPEC)
        sandbox = Sandbox(place / "killed", _SPEC)
        try:
            _kill_ten_times(sandbox, random.Random(SEED), reference.passes["forward"])
            found = assert_all(sandbox, reference)
        finally:
            sandbox.close()
        useful, executed = (float(o.passes["forward"]) for o in (reference, found))
        return [
            paired("P7 steps under ten kills / useful", [executed], [useful], "", _GOAL),
            alone("P7 resume to first step", _first_steps(place / "warm", repeats), "s"),
        ]


def _kill_ten_times(sandbox: Sandbox, draw: random.Random, useful: int) -> None:
    """Kill a trial's process or the driver, in turn, each after about a tenth of the sweep."""
    driver = None
    for number in range(_KILLS):
        place = sandbox.probe.further("forward", draw.randint(1, useful // _KILLS))
        if driver is None:
            driver = sandbox.run() if number == 0 else sandbox.resume()
        worker = driver.until_held(place)
        if number % 2:
            driver.kill()
            driver = None
        else:
            psutil.Process(worker).send_signal(signal.SIGKILL)
        sandbox.probe.release(place)
    ended = (driver or sandbox.resume()).wait()
    assert ended.code == 0, ended.text


def _first_steps(directory: Path, repeats: int) -> list[float]:
    sandbox = Sandbox(directory, _SPEC)
    try:
        driver, _ = sandbox.run_to("forward", 60)
        driver.power_off()
        template = Template(sandbox)
        return [_first_step(template.fresh()) for _ in range(repeats)]
    finally:
        sandbox.close()


def _first_step(sandbox: Sandbox) -> float:
    before, started = sandbox.probe.count(), time.perf_counter()
    driver = sandbox.resume()
    driver.until(lambda: sandbox.probe.count() > before)
    seconds = time.perf_counter() - started
    driver.power_off()
    return seconds
