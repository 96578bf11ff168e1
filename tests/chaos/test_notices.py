"""Row 51: a machine is about to be taken away, and says so.

What must not live here: nodes that go without a notice (`test_cluster.py`), and signals to the
driver (`test_signals.py`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos import probe_task
from tests.chaos.invariants import (
    PARALLEL,
    SERIAL,
    Driver,
    Outcome,
    References,
    Sandbox,
    assert_all,
    assert_no_residue,
    assert_prints_resume_command,
)
from tests.chaos.ray_nodes import LOOPBACK, Node, RayNodes
from tests.chaos.sandbox import RANKED
from tests.time_limits import scaled

_TOKEN = "of-the-cluster"
_COMMAND = 'preemption={command: test -e "$NOTICE", every: 0.2s}'
_NOTICE_SECONDS = 30.0
"""The shortest notice of a cloud's provider."""
_NOTICES = 3
_DRAIN = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "by the cloud")


@pytest.fixture
def sandbox(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "sweep", getattr(request, "param", PARALLEL))
    made.cli.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    yield made
    made.close()


@pytest.fixture
def nodes(sandbox: Sandbox) -> Iterator[RayNodes]:
    made = RayNodes(
        {
            probe_task.VARIABLE: str(sandbox.probe.directory),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _TOKEN,
        }
    )
    yield made
    made.close()


class _Machines:
    """Nodes that each have a file whose existence gives notice."""

    def __init__(self, sandbox: Sandbox, nodes: RayNodes) -> None:
        self._sandbox, self._nodes = sandbox, nodes
        self.files: dict[str, Path] = {}

    def start(self, *, cpus: int) -> Node:
        file = self._sandbox.directory / f"notice-{len(self.files)}"
        node = self._nodes.start(cpus=cpus, environment={"NOTICE": str(file)})
        self.files[node.id] = file
        return node

    def drain(self, node: Node) -> None:
        """Have Ray give the notice, as its autoscaler and `ray drain-node` do."""
        where = ("--address", node.address, "--node-id", node.id)
        subprocess.run(
            [Path(sys.executable).with_name("ray"), "drain-node", *where, *_DRAIN],
            env=self._sandbox.cli.environment | {LOOPBACK: "0"},
            check=True,
        )

    def until_gone(self, driver: Driver, node: Node, place: str) -> None:
        """Let the process at a place take its step once the driver knows of a node's notice; the
        node then ends by itself, and its machine is switched off.
        """
        driver.until(Path(f"{self._sandbox.paths.leaves}{node.id}").exists)
        self._sandbox.probe.release(place)
        driver.until(lambda: not _runs(node.raylet), seconds=scaled(_NOTICE_SECONDS))
        node.kill()


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _assert_no_step_lost(found: Outcome, reference: Outcome) -> None:
    """All attempts together made as many passes as a sweep that nothing interrupted."""
    assert found.passes["backward"] == reference.passes["backward"]


@pytest.mark.chaos
@pytest.mark.fault(51, "notices on several nodes, by Ray and by the command; each node then goes")
def test_row_51_notices_on_a_cluster(
    sandbox: Sandbox, references: References, nodes: RayNodes
) -> None:
    """Each notice is one more attempt of the node's trial, and no step more."""
    reference = references.of(PARALLEL)
    machines = _Machines(sandbox, nodes)
    head, *others = (machines.start(cpus=cpus) for cpus in (0, 1, 1))
    place = sandbox.probe.hold("backward", 6)
    driver = sandbox.run("--address", head.address, "-s", _COMMAND)
    for number in range(_NOTICES):
        worker = driver.until_held(place)
        (leaving,) = [node for node in others if worker in node.workers()]
        others = [*(node for node in others if node is not leaving), machines.start(cpus=1)]
        if number % 2:
            machines.drain(leaving)
        else:
            machines.files[leaving.id].touch()
        further = sandbox.probe.further("backward", 6)
        machines.until_gone(driver, leaving, place)
        place = further
    for node in others:  # a worker that is about to start there has its trial placed again
        machines.drain(node)
    machines.start(cpus=1)
    driver.until_held(place)
    sandbox.probe.release(place)
    ended = driver.wait()
    found = assert_all(sandbox, reference, ended)
    _assert_no_step_lost(found, reference)
    assert ended.text.count("is about to be taken away: its trials save") == _NOTICES + len(others)
    shown = [sandbox.cli.json("show", "chaos", str(one["number"])) for one in found.trials]
    said = [sentence for trial in shown for sentence in trial["lost_workers"]]
    assert len(said) >= _NOTICES
    assert all(": saved at step" in sentence for sentence in said)
    assert sum(trial["attempts"] for trial in found.trials) == len(found.trials) + len(said)


@pytest.mark.chaos
@pytest.mark.parametrize("sandbox", [RANKED], indirect=True)
@pytest.mark.fault(51, "a notice of the node of a trial's first rank, and of another rank's")
def test_row_51_notice_of_a_rank(
    sandbox: Sandbox, references: References, nodes: RayNodes
) -> None:
    reference = references.of(RANKED)
    machines = _Machines(sandbox, nodes)
    head, *others = (machines.start(cpus=cpus) for cpus in (0, 1, 1))
    place = sandbox.probe.hold("backward.1", 5)
    driver = sandbox.run("--address", head.address, "-s", _COMMAND)
    for first in (False, True):
        driver.until_held(place)
        (leaving,) = [node for node in others if bool(node.workers()) == first]
        others = [*(node for node in others if node is not leaving), machines.start(cpus=1)]
        machines.files[leaving.id].touch()
        further = sandbox.probe.further("backward.1", 6)
        machines.until_gone(driver, leaving, place)
        place = further
    driver.until_held(place)
    sandbox.probe.release(place)
    found = assert_all(sandbox, reference, driver.wait())
    _assert_no_step_lost(found, reference)
    assert sum(trial["attempts"] for trial in found.trials) == len(found.trials) + 2


@pytest.mark.parametrize("sandbox", [SERIAL], indirect=True)
@pytest.mark.fault(51, "the command gives notice on one machine: the sweep stops and is resumed")
def test_row_51_notice_on_one_machine(sandbox: Sandbox, references: References) -> None:
    reference, file = references.of(SERIAL), sandbox.directory / "notice"
    sandbox.cli.environment["NOTICE"] = str(file)
    driver, _ = sandbox.run_to("backward", 38, "-s", _COMMAND)
    file.touch()
    driver.until(sandbox.paths.drain.exists)
    sandbox.probe.release("backward-38")
    ended = driver.wait()
    assert_prints_resume_command(ended, 143, "this machine is about to be taken away")
    assert_no_residue(sandbox)
    file.unlink()
    found = assert_all(sandbox, reference, sandbox.resume_to_end())
    _assert_no_step_lost(found, reference)
