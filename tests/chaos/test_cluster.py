"""Rows 4, 5, 6 and 32: sweeps on a cluster of several Ray nodes, and unusable clusters.

The nodes are processes of their own on this machine; for row 32 each has a network of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.chaos import probe_task
from tests.chaos.invariants import (
    PARALLEL,
    Driver,
    References,
    Sandbox,
    assert_all,
    assert_ended,
    assert_no_residue,
)
from tests.chaos.networks import INSTALL, Host, Network, missing_tool, refusal
from tests.chaos.ray_nodes import LOOPBACK, Node, RayNodes
from tests.chaos.tracking_service import Service
from tests.integration.commandline import wait_until
from tests.object_store import BUCKET, ObjectStore, named_by_environment
from tests.time_limits import scaled
from trainable.checkpoint import CheckpointStore

pytestmark = pytest.mark.chaos
_TOKEN = "of-the-cluster"
_RESCHEDULED, _GONE = 60.0, 60.0
_DELAY_SECONDS = 0.2
_FENCED = "another process has taken over"
_PLACE = "backward-16"
_NOTICED_EARLIER = {"RAY_health_check_failure_threshold": "3"}
"""As in `docker/`; without it a minute passes before Ray's head gives a silent node up."""
_PATIENCE, _STRANGER_SECONDS = 120.0, 30.0
_SUBMIT = """
import sys, ray
address, marker = sys.argv[1:]
ray.init(address=address)
ray.get(ray.remote(lambda: open(marker, "w").close()).remote(), timeout=60)
"""
_PACE, _RAYLET_GIVES_UP = 0.2, 120.0


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "sweep", PARALLEL)
    made.cli.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    yield made
    made.close()


@pytest.fixture
def nodes(sandbox: Sandbox) -> Iterator[RayNodes]:
    made = _nodes(sandbox)
    yield made
    made.close()


@pytest.fixture
def network() -> Iterator[Network]:
    """Three hosts; left out where this machine lets us make none."""
    if missing := missing_tool():
        assert os.environ.get("CI") != "true", f"{missing} is missing: {INSTALL}"
        pytest.skip(f"{missing} is not installed; get it with: {INSTALL}")
    if reason := refusal():
        pytest.skip(reason)
    with Network(3) as made:
        yield made


def _nodes(sandbox: Sandbox, environment: Mapping[str, str] | None = None) -> RayNodes:
    return RayNodes(
        {
            **(environment or {}),
            probe_task.VARIABLE: str(sandbox.probe.directory),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _TOKEN,
        }
    )


def _victim(driver: Driver, sandbox: Sandbox, others: list[Node]) -> tuple[Node, int, str]:
    """Run until trials train on two nodes; returns the one of the process that is held, that
    process, and the log of its trial.
    """
    worker = driver.until_held(sandbox.probe.hold("backward", 16))
    driver.until(lambda: all(node.workers() for node in others))
    (node,) = [node for node in others if worker in node.workers()]
    return node, worker, node.workers()[worker]


def _until_further(driver: Driver, log: str) -> float:
    """Seconds until a trial has trained and saved again, from now on."""
    store, began = CheckpointStore(Path(log).parent), time.monotonic()

    def newest() -> int:  # none before its first save
        return max((one.number for one in store.generations()), default=0)

    before = newest()
    driver.until(lambda: newest() > before, seconds=150)
    return time.monotonic() - began


def _assert_gone(*nodes: Node) -> None:
    """No process of a trial, or of another job of ours, is left on a cluster that lives."""
    wait_until(lambda: not any(node.workers() for node in nodes), seconds=30)


@pytest.mark.fault(4, "kill -9 of a node, or of its raylet alone, while two nodes train")
@pytest.mark.parametrize("whole", [True, False], ids=["node", "raylet"])
def test_row_04_node_killed(
    sandbox: Sandbox, references: References, nodes: RayNodes, whole: bool
) -> None:
    reference = references.of(PARALLEL)
    head, *others = (nodes.start(cpus=cpus) for cpus in (0, 2, 2))
    driver = sandbox.run("--address", head.address)
    node, _, log = _victim(driver, sandbox, others)
    if whole:
        node.kill()
    else:
        os.kill(node.raylet, signal.SIGKILL)
    seconds = _until_further(driver, log)
    print(f"trained again {seconds:.1f} s after the kill")
    assert seconds < scaled(_RESCHEDULED)
    found = assert_all(sandbox, reference, driver.wait())
    assert sum(trial["attempts"] for trial in found.trials) == len(found.trials) + 1
    _assert_gone(*others)


@pytest.mark.fault(4, "the same where checkpoints and records are shared, and its driver")
def test_row_04_node_and_driver_killed_on_shared_storage(
    references: References, service_on_postgres: Service, tmp_path: Path
) -> None:
    """The two lines of a spec that a team shares, with trials on a cluster."""
    shared = (
        f"{PARALLEL}tracking: {{uri: {service_on_postgres.url}}}\n"
        f'storage: {{checkpoints: "s3://{BUCKET}/shared"}}\n'
    )
    with ObjectStore() as store, named_by_environment(store):
        where = store.environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
        sandbox = Sandbox(tmp_path / "sweep", shared, where, store=service_on_postgres.store)
        nodes = _nodes(sandbox, store.environment())
        try:
            head, *others = (nodes.start(cpus=cpus) for cpus in (0, 2, 2))
            driver = sandbox.run("--address", head.address)
            node, _, _ = _victim(driver, sandbox, others)
            node.kill()
            driver.until_held(sandbox.probe.further("backward", 20))
            assert driver.kill().code == -signal.SIGKILL
            driver = sandbox.resume("--address", head.address)
            found = assert_all(sandbox, references.of(PARALLEL), driver.wait())
            assert all(each["checkpoint"].startswith("s3://") for each in found.trials)
            assert not (sandbox.cli.root / "mlflow.db").exists()
        finally:
            sandbox.close()
            nodes.close()


@pytest.mark.fault(5, "kill -9 of Ray's head with its whole node, on which the driver runs")
def test_row_05_head_killed(sandbox: Sandbox, references: References, nodes: RayNodes) -> None:
    reference = references.of(PARALLEL)
    head = nodes.start(cpus=0)
    nodes.start(cpus=2)
    sandbox.cli.environment["RAY_ADDRESS"] = head.address
    driver = sandbox.run()
    driver.until_held(sandbox.probe.hold("backward", 16))
    began = time.monotonic()
    head.kill()
    ended = driver.wait()
    seconds = time.monotonic() - began
    print(f"left {seconds:.1f} s after the kill")
    assert seconds < scaled(_GONE)
    assert_ended(ended, 3, "the Ray cluster is lost: its (head|node)")
    assert ended.last_line == "sweep resume chaos"
    nodes.close()
    new = _nodes(sandbox)
    try:
        sandbox.cli.environment["RAY_ADDRESS"] = new.start(cpus=2).address
        assert_all(sandbox, reference, sandbox.resume_to_end())
    finally:
        new.close()


@pytest.mark.fault(32, "what a node sends, and what is sent to it, takes 200 ms all the time")
def test_row_32_slow_network(
    sandbox: Sandbox, references: References, network: Network, nodes: RayNodes
) -> None:
    reference = references.of(PARALLEL)
    ours, far, _ = network.hosts
    sandbox.cli.within = ours.within
    head = nodes.start(cpus=0, host=ours)
    network.delay(far, _DELAY_SECONDS)
    node = nodes.start(cpus=2, host=far)
    assert _seconds_to(far, ours) > 2 * _DELAY_SECONDS
    driver = sandbox.run("--address", head.address)
    found = assert_all(sandbox, reference, driver.wait())
    print(f"took {driver.wait().seconds:.1f} s, the reference {reference.seconds:.1f} s")
    assert [trial["attempts"] for trial in found.trials] == [1, 1, 1, 1]
    _assert_gone(node)


@pytest.mark.fault(32, "a node is cut off, its trial is told nothing, and the way is open again")
def test_row_32_node_cut_off(
    sandbox: Sandbox, references: References, network: Network, nodes: RayNodes
) -> None:
    """The trial goes on elsewhere; what still trains on the storage finds itself shut out."""
    reference = references.of(PARALLEL)
    sandbox.cli.within = network.hosts[0].within
    head, *others = (
        nodes.start(cpus=cpus, host=host, environment=_NOTICED_EARLIER)
        for cpus, host in zip((0, 2, 2), network.hosts, strict=True)
    )
    driver = sandbox.run("--address", head.address)
    node, stale, log = _victim(driver, sandbox, others)
    worker = next(one for one in psutil.Process(stale).parents() if one.ppid() == node.raylet)
    cut_off = network.hosts[1 + others.index(node)]
    network.cut(cut_off)
    sandbox.probe.pace(_PACE)  # so that both train at once
    seconds = _until_further(driver, log)
    print(f"trained again {seconds:.1f} s after the cut")
    assert seconds < scaled(_RESCHEDULED)
    # It has not heard of any of this, and writes the step that it is in.
    assert _FENCED not in Path(log).read_text()
    sandbox.probe.release(_PLACE)
    wait_until(lambda: _FENCED in Path(log).read_text(), seconds=30)
    wait_until(lambda: not psutil.pid_exists(stale), seconds=30)
    assert worker.is_running()
    network.heal(cut_off)
    began = time.monotonic()
    wait_until(lambda: not worker.is_running(), seconds=_RAYLET_GIVES_UP)
    print(f"the worker was gone {time.monotonic() - began:.1f} s after the way was open")
    found = assert_all(sandbox, reference, driver.wait())
    assert sum(trial["attempts"] for trial in found.trials) == len(found.trials) + 1
    _assert_gone(*others)


_KNOCK = """
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 1))
except ConnectionRefusedError:
    print(time.monotonic() - began)
"""


def _seconds_to(host: Host, start: Host) -> float:
    """How long a host takes to answer another one."""
    command = [*start.within, sys.executable, "-c", _KNOCK, host.address]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


_OTHER_JOB = """
import os, sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=0)
class Other:
    def count(self):
        return os.getpid()
other = Other.remote()
print(ray.get(other.count.remote()), flush=True)
for line in sys.stdin:
    print(ray.get(other.count.remote(), timeout=30), flush=True)
"""


@pytest.mark.fault(6, "kill -9 of a driver whose trials run on a cluster, Ctrl-C and SIGTERM")
def test_row_06_driver_of_a_cluster_killed(
    sandbox: Sandbox, references: References, nodes: RayNodes, tmp_path: Path
) -> None:
    """Its trials end on the cluster; another job there goes on."""
    reference = references.of(PARALLEL)
    head, other = nodes.start(cpus=0), nodes.start(cpus=2)
    python = Path(shutil.which("python", path=sandbox.cli.environment["PATH"]) or "python")
    with subprocess.Popen(
        [python, "-c", _OTHER_JOB, head.address],
        env=sandbox.cli.environment | {LOOPBACK: "0"},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        actor = job.stdout.readline()
        assert psutil.pid_exists(int(actor))
        driver = sandbox.run("--address", head.address)
        driver.until_held(sandbox.probe.hold("backward", 16))
        driver.kill()
        _assert_gone(other)
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            driver = sandbox.resume("--address", head.address)
            driver.until_held(sandbox.probe.further("backward", 6))
            for path in sandbox.probe.directory.glob("h*ld-*"):
                path.unlink()
            driver.send(number)
            ended = driver.wait()
            assert_ended(ended, code)
            assert ended.last_line == f"sweep resume chaos --address {head.address}"
            _assert_gone(other)
            assert_no_residue(sandbox)
        print("asked again", file=job.stdin, flush=True)
        assert job.stdout.readline() == actor
        assert_all(sandbox, reference, sandbox.resume_to_end("--address", head.address))
        job.stdin.close()
        assert job.wait(60) == 0


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as made:
        yield made


def test_unusable_cluster_is_refused_before_anything_exists(
    sandbox: Sandbox, nodes: RayNodes, store: ObjectStore, tmp_path: Path
) -> None:
    """Each within 30 s, with exit 2, a sentence, and nothing made below the root."""
    metadata = tmp_path / "older" / "gradsweep-0.0.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gradsweep\nVersion: 0.0.9\n")
    head = nodes.start(cpus=2, environment=store.environment())

    def refused(cause: str, *more: str, address: str = head.address) -> str:
        ended = sandbox.run("--address", address, *more).wait(60)
        assert_ended(ended, 2, cause)
        assert ended.seconds < scaled(30)
        assert not sandbox.cli.root.exists()
        return ended.text

    refused("no process answers at 127.0.0.1:1 ", address="127.0.0.1:1")
    refused(r"resources.cpu: 64 CPUs .* the largest is .* \(2 CPUs", "-s", "resources.cpu=64")
    sandbox.cli.environment["RAY_AUTH_TOKEN"] = "another"
    refused("refuses this process: its token|no head of a Ray cluster answered")
    sandbox.cli.environment |= store.environment() | {"RAY_AUTH_TOKEN": _TOKEN}
    nodes.start(
        cpus=1, environment=store.environment() | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    )
    prefix = f"s3://{BUCKET}/sweeps"
    told = refused(
        f"^node .*: storage.checkpoints: {prefix} cannot be listed: .*NETWORK_CONNECTION.*; a "
        "trial there has the environment that `ray start` had$",
        *("-s", f"storage.checkpoints={prefix}"),
    )
    assert told.count("storage.checkpoints") == 1, "the head reaches it"
    assert store.objects() == []
    nodes.start(cpus=1, environment={"PYTHONPATH": str(metadata.parent)})
    refused(r"^node .*: has gradsweep 0\.0\.9; this process has ")


def test_nodes_without_the_shared_root_are_named(sandbox: Sandbox, nodes: RayNodes) -> None:
    """One has other files where the root is, one may only read them: mounts of their own."""
    if os.geteuid() != 0:
        pytest.skip("mounts of a process' own are for root alone; be root")
    head, there = nodes.start(cpus=1), shlex.quote(str(sandbox.directory))
    for mount in (
        f"mount -t tmpfs other {there}",
        f"mount --bind {there} {there} && mount -o remount,bind,ro {there}",
    ):
        within = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
        nodes.start(cpus=1, within=within)
    ended = sandbox.run("--address", head.address).wait(60)
    assert_ended(ended, 2, "mount a shared file system")
    assert not sandbox.cli.root.exists()
    told = sorted(line for line in ended.text.splitlines() if line.startswith("node "))
    place = re.escape(str(sandbox.cli.root))
    expected = (
        "cannot be read and written there .Read-only file system.",
        "the driver's files are not there",
    )
    assert len(told) == len(expected), "the head sees it"
    for line, fault in zip(told, expected, strict=True):
        assert re.match(f"node .*: {place}: {fault}; every node must see the same files", line)


@pytest.mark.parametrize("stranger", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "mine"}])
def test_client_without_token_runs_nothing_on_the_cluster(
    nodes: RayNodes, tmp_path: Path, stranger: dict[str, str]
) -> None:
    head, marker = nodes.start(cpus=1), tmp_path / "marker"

    def submit(environment: dict[str, str], seconds: float) -> None:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        with contextlib.suppress(subprocess.TimeoutExpired):  # Ray itself may go on asking
            subprocess.run(
                [sys.executable, "-c", _SUBMIT, head.address, str(marker)],
                env=plain | {LOOPBACK: "0", "RAY_AUTH_MODE": "disabled"} | environment,
                capture_output=True,
                timeout=scaled(seconds),
                check=False,
            )

    submit(nodes.environment, _PATIENCE)
    assert marker.exists(), "or else what follows would show nothing"
    marker.unlink()
    submit(stranger, _STRANGER_SECONDS)
    assert not marker.exists()


def test_uploaded_code_is_what_trains(sandbox: Sandbox, nodes: RayNodes) -> None:
    """The module that the nodes import is a copy; the sweep's own files are not in it."""
    head = nodes.start(cpus=2)
    (sandbox.directory / "large.bin").write_bytes(bytes(51 * 2**20))
    probe = sandbox.directory / "probe_task.py"
    said = "import sys; there = sorted(os.listdir(Path(__file__).parent))\n"
    said += 'print("imported", __file__, there, file=sys.stderr)\n'
    probe.write_text(probe.read_text() + said)
    ended = sandbox.run("--address", head.address, "-s", "trials=1").wait()
    assert_ended(ended, 0, r"not uploaded, .*: large.bin \(51 MiB\)")
    log = (sandbox.paths.trial(0) / "trial.log").read_text()
    ((where, there),) = re.findall(r"imported (\S+) (\[.*\])", log)
    assert not Path(where).is_relative_to(sandbox.directory)
    assert "chaos.yaml" in there
    assert "large.bin" not in there
    assert "runs" not in there
