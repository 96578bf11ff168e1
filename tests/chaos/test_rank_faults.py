"""Rows 37 and 40 to 46: a process of a trial with several is killed, stopped or slow; shards.

Every trial here has two ranks, each a process of its own; three where it saves in shards, since
a sum of two numbers is the same in either order. What must not live here: killed runs that no
sweep has started (`test_resume_matrix.py`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.invariants import (
    References,
    Sandbox,
    assert_all,
    assert_ended,
    assert_no_residue,
)
from tests.chaos.outcome import Outcome
from tests.chaos.probe_task import RESET
from tests.chaos.ray_nodes import RayNodes
from tests.chaos.sandbox import MICRO_BATCHES, NAME, RANKED, Driver
from tests.time_limits import scaled

_GONE_SECONDS = 10.0
_STEP_SECONDS = 8
_ON_FIRST_ALONE = RANKED.replace(":Ranked", ":Probe")
"""The task has an `evaluate()` of its own: the first rank evaluates, and the others wait."""
_SHARDED = RANKED.replace("precision: fp16}", "precision: fp32, sharding: fsdp}").replace(
    "workers: 2, cpu: 1", "workers: 3, cpu: 0.5"
)
"""Each of three ranks holds and saves a part of the model."""


@pytest.fixture
def sandbox(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "sweep", getattr(request, "param", RANKED))
    yield made
    made.close()


def _kill(driver: Driver, sandbox: Sandbox, place: str, victim: int | None = None) -> int:
    """Wait until a rank is held at a place, kill it or another one, let it go; return the other
    rank's process.
    """
    held = driver.until_held(place)
    ranks = {sandbox.probe.rank(number) for number in (0, 1)}
    assert held in ranks
    killed = held if victim is None else sandbox.probe.rank(victim)
    os.kill(killed, signal.SIGKILL)
    sandbox.probe.release(place)
    (other,) = ranks - {killed}
    return other


def _kill_in_exchange(driver: Driver, sandbox: Sandbox, place: str) -> None:
    """Kill rank 1 while it waits for rank 0, which is held before the exchange of a step."""
    driver.until_held(place)
    waiting = psutil.Process(sandbox.probe.rank(1))
    passes = sandbox.probe.count("backward.0")
    driver.until(lambda: sandbox.probe.count("backward.1") == passes)
    driver.until(lambda: waiting.status() == psutil.STATUS_SLEEPING)
    waiting.kill()
    sandbox.probe.release(place)


def _assert_attempts(found: Outcome, *, losses: int) -> None:
    assert sum(trial["attempts"] for trial in found.trials) == len(found.trials) + losses


@pytest.mark.chaos
@pytest.mark.fault(37, "kill -9 of a further rank between two trials")
def test_row_37_rank_lost_between_two_trials(sandbox: Sandbox, references: References) -> None:
    """Its actor is kept for the next trial, to which its loss is none."""
    reference = references.of(RANKED)
    sandbox.probe.do("watch_reset", "forward.0", 12)  # in the first trial
    place = sandbox.probe.hold(RESET, 1)
    driver = sandbox.run()
    driver.until_held(place)
    (actor,) = (
        one
        for one in psutil.Process(driver.pid).children(recursive=True)
        if "ray::SweepRank" in " ".join(one.cmdline())
    )
    actor.kill()
    sandbox.probe.release(place)
    found = assert_all(sandbox, reference, driver.wait())
    _assert_attempts(found, losses=0)


@pytest.mark.fault(40, "kill -9 of a rank that waits for the other one in the exchange of a step")
def test_row_40_rank_killed_in_exchange(sandbox: Sandbox, references: References) -> None:
    reference = references.of(RANKED)
    place = sandbox.probe.hold("backward.0", 4 * MICRO_BATCHES)  # after the second checkpoint
    driver = sandbox.run()
    _kill_in_exchange(driver, sandbox, place)
    ended = driver.wait()
    how = "the process of rank 1 ended by signal 9 (SIGKILL)"
    assert how in ended.text
    assert how in sandbox.cli.ok("show", NAME, "0", "--log")
    assert how in sandbox.cli.json("show", NAME, "0")["lost_workers"][0]
    found = assert_all(sandbox, reference, ended)
    _assert_attempts(found, losses=1)


@pytest.mark.chaos
@pytest.mark.fault(40, "kill -9 of a rank in forward, backward, an evaluation, a save")
def test_row_40_rank_killed_at_each_place(sandbox: Sandbox, references: References) -> None:
    reference = references.of(RANKED)
    places = (("forward.1", 7), ("validation.1", 3), ("snapshot.1", 2), ("backward.1", 9))
    place = sandbox.probe.further(*places[0])
    driver = sandbox.run()
    for following in (*places[1:], None):
        _kill(driver, sandbox, place)
        place = sandbox.probe.further(*following) if following else ""
    found = assert_all(sandbox, reference, driver.wait())
    _assert_attempts(found, losses=len(places))


@pytest.mark.chaos
@pytest.mark.fault(40, "kill -9 of a rank that waits while the first one evaluates or saves")
@pytest.mark.parametrize("sandbox", [_ON_FIRST_ALONE], indirect=True, ids=["own evaluate"])
def test_row_40_rank_killed_while_it_waits(sandbox: Sandbox, references: References) -> None:
    reference = references.of(_ON_FIRST_ALONE)
    place = sandbox.probe.hold("validation.0", 1)
    driver = sandbox.run()
    first = _kill(driver, sandbox, place, victim=1)
    assert first == sandbox.probe.rank(0)
    found = assert_all(sandbox, reference, driver.wait())
    _assert_attempts(found, losses=1)


@pytest.mark.chaos
@pytest.mark.fault(41, "kill -9 of the first rank in forward, in a save, in an evaluation")
def test_row_41_first_rank_killed(sandbox: Sandbox, references: References) -> None:
    """The other rank is gone soon, while the sweep goes on."""
    reference = references.of(RANKED)
    places = (("forward.0", 7), ("snapshot.0", 2), ("validation.0", 3))
    place = sandbox.probe.further(*places[0])
    driver = sandbox.run()
    for following in (*places[1:], None):
        other = _kill(driver, sandbox, place)
        place = sandbox.probe.further(*following) if following else ""
        driver.until(lambda: not psutil.pid_exists(other), seconds=_GONE_SECONDS)  # noqa: B023
    found = assert_all(sandbox, reference, driver.wait())
    _assert_attempts(found, losses=len(places))


@pytest.mark.chaos
@pytest.mark.fault(42, "SIGSTOP of a rank for longer than failures.step_timeout allows")
@pytest.mark.parametrize("computes", [0.0, 0.5], ids=["at once", "after a long step of the first"])
def test_row_42_rank_stopped(sandbox: Sandbox, references: References, computes: float) -> None:
    """The first rank waits for it, at once or when it has computed for most of the time-out."""
    reference = references.of(RANKED)
    sandbox.cli.write("chaos.yaml", f"{RANKED}failures: {{step_timeout: {_STEP_SECONDS}s}}\n")
    places = [sandbox.probe.hold(f"forward.{rank}", 7) for rank in (0, 1)]
    driver = sandbox.run()
    _, stopped = (driver.until_held(place) for place in places)
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(computes * _STEP_SECONDS)
    for place in places:
        sandbox.probe.release(place)
    driver.until(lambda: not psutil.pid_exists(stopped))
    found = assert_all(sandbox, reference, driver.wait())
    _assert_attempts(found, losses=1)


@pytest.mark.chaos
@pytest.mark.fault(42, "SIGSTOP of a rank that waits while the first one evaluates")
@pytest.mark.parametrize("sandbox", [_ON_FIRST_ALONE], indirect=True, ids=["own evaluate"])
def test_row_42_rank_stopped_while_it_waits(sandbox: Sandbox, references: References) -> None:
    reference = references.of(_ON_FIRST_ALONE)
    text = f"{_ON_FIRST_ALONE}failures: {{step_timeout: {_STEP_SECONDS}s}}\n"
    sandbox.cli.write("chaos.yaml", text)
    place = sandbox.probe.hold("validation.0", 1)
    driver = sandbox.run()
    driver.until_held(place)
    stopped = sandbox.probe.rank(1)
    os.kill(stopped, signal.SIGSTOP)
    sandbox.probe.release(place)
    driver.until(lambda: not psutil.pid_exists(stopped))
    found = assert_all(sandbox, reference, driver.wait())
    _assert_attempts(found, losses=1)


@pytest.mark.chaos
@pytest.mark.fault(43, "kill -9 of the node on which one rank of a trial runs")
@pytest.mark.parametrize("rank", [1, 0])
def test_row_43_node_of_a_rank_lost(sandbox: Sandbox, references: References, rank: int) -> None:
    reference = references.of(RANKED)
    spread = RANKED.replace("cpu: 1}", "cpu: 1, placement: spread}")
    assert spread != RANKED
    sandbox.cli.write("chaos.yaml", spread)
    nodes = RayNodes(sandbox.cli.environment)
    try:
        head, *others = (nodes.start(cpus=cpus) for cpus in (0, 2, 2))
        place = sandbox.probe.hold(f"forward.{rank}", 7)
        driver = sandbox.run("--address", head.address)
        held = driver.until_held(place)
        (lost,) = [
            n for n in others if n.raylet in {p.pid for p in psutil.Process(held).parents()}
        ]
        other = psutil.Process(sandbox.probe.rank(1 - rank))
        assert lost.raylet not in {process.pid for process in other.parents()}
        lost.kill()
        sandbox.probe.release(place)
        found = assert_all(sandbox, reference, driver.wait())
        _assert_attempts(found, losses=1)
    finally:
        sandbox.close()
        nodes.close()


@pytest.mark.chaos
@pytest.mark.fault(44, "an import of the task that takes longer than a step may")
def test_row_44_slow_import(sandbox: Sandbox, references: References) -> None:
    """It costs no retry; and 10 s after the sweep nothing of its ranks is left."""
    reference = references.of(RANKED)
    task = sandbox.directory / "probe_task.py"
    source = task.read_text(encoding="utf-8")
    task.write_text(f"{source}\n\ntime.sleep({1.5 * _STEP_SECONDS:.0f})\n", encoding="utf-8")
    sandbox.cli.write("chaos.yaml", f"{RANKED}failures: {{step_timeout: {_STEP_SECONDS}s}}\n")
    ended = sandbox.run().wait()
    assert_no_residue(sandbox, seconds=_GONE_SECONDS)
    found = assert_all(sandbox, reference, ended)
    _assert_attempts(found, losses=0)


@pytest.mark.chaos
@pytest.mark.fault(44, "kill -9 of the driver: both ranks of its trial end")
def test_row_44_ranks_of_a_killed_driver(sandbox: Sandbox, references: References) -> None:
    reference = references.of(RANKED)
    place = sandbox.probe.hold("forward.1", 7)
    driver = sandbox.run()
    driver.until_held(place)
    ranks = [psutil.Process(sandbox.probe.rank(number)) for number in (0, 1)]
    driver.kill()
    _, alive = psutil.wait_procs(ranks, timeout=scaled(_GONE_SECONDS))
    assert not alive
    sandbox.probe.release(place)
    ended = sandbox.resume_to_end()
    assert_ended(ended, 0)
    found = assert_all(sandbox, reference, ended)
    _assert_attempts(found, losses=1)


@pytest.mark.chaos
@pytest.mark.fault(45, "a flipped bit in the shard of each rank, and in the list of the shards")
@pytest.mark.parametrize("sandbox", [_SHARDED], indirect=True, ids=["sharded"])
def test_row_45_damaged_shard_falls_back_to_previous(
    sandbox: Sandbox, references: References
) -> None:
    """Once each: the trial resumes from the checkpoint before, and is interrupted again."""
    reference = references.of(_SHARDED)
    files = (*(f"shard-0000{rank}.pt" for rank in range(3)), "state.pt")
    checkpoints = sandbox.paths.trial(0) / "checkpoints"
    driver, _ = sandbox.run_to("forward.1", 4 * MICRO_BATCHES + 1)
    for name in files:
        driver.until(lambda: len(_generations(checkpoints)) > 1)
        driver.power_off()
        for place in sandbox.probe.directory.glob("held-*"):
            place.unlink()
        newest = _generations(checkpoints)[-1] / name
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 8
        newest.write_bytes(content)
        last = name == files[-1]
        place_of_next = "" if last else sandbox.probe.further("forward.1", 2 * MICRO_BATCHES + 1)
        driver = sandbox.resume()
        if not last:
            driver.until_held(place_of_next)
    assert_all(sandbox, reference, driver.wait())
    assert len(list((checkpoints / "quarantine").iterdir())) == len(files)


@pytest.mark.chaos
@pytest.mark.fault(46, "kill -9 of a rank, and of the first one, between shard and manifest")
@pytest.mark.parametrize("sandbox", [_SHARDED], indirect=True, ids=["sharded"])
def test_row_46_rank_killed_between_shard_and_manifest(
    sandbox: Sandbox, references: References
) -> None:
    """The checkpoint is not visible, and no file of it is left."""
    assert "workers: 3" in sandbox.spec
    reference = references.of(_SHARDED)
    checkpoints = sandbox.paths.trial(0) / "checkpoints"
    place = sandbox.probe.hold("shard.2", 2)
    driver = sandbox.run()
    for victim in (2, 0):
        held = driver.until_held(place)
        assert held == sandbox.probe.rank(victim)
        driver.until(lambda: len({sandbox.probe.count(f"shard.{rank}") for rank in range(3)}) == 1)
        begun = {shard.parent.name for shard in checkpoints.rglob(".writing-*/**/shard-*.pt")}
        assert len(begun) == 1
        assert not begun & {path.name for path in _generations(checkpoints)}
        released, place = place, sandbox.probe.further("shard.0", 2) if victim else ""
        os.kill(held, signal.SIGKILL)
        sandbox.probe.release(released)
    found = assert_all(sandbox, reference, driver.wait())
    _assert_attempts(found, losses=2)


def _generations(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob("step-*"))
