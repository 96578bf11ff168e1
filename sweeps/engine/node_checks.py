"""Check every node of a cluster before a sweep is created.

Each node must have the same version of Gradsweep, see the same files, and reach the object store
of the checkpoints. The check has a time limit, requests no CPU from Ray, and leaves no files.
What must not live here: connecting (`cluster`), and how trials share the nodes (`resources`).
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sweeps.engine.cluster_address import ClusterRefused
from sweeps.engine.resources import LEAST_GPU_MEMORY, Gpu, Machine
from sweeps.stores import CHECKPOINTS_KEY

SECONDS = 75.0
"""How long all nodes together may take to answer. By default, Ray's head takes up to 65 s to
notice a dead node."""
_SEEN_SECONDS = 10.0
"""How long a network file system may take to show a node's file to the driver."""
_STALE_SECONDS = 600.0
"""The age after which the directory of another check counts as abandoned."""
_PREFIX = ".nodes-"
_DISTRIBUTION = "gradsweep"
_DRIVER_FILE = "driver"


def check_nodes(
    nodes: Mapping[str, Mapping[str, Any]], root: Path, store: str | None = None
) -> list[Machine]:
    """Check every node on which a trial may run."""
    checked = {
        node: info for node, info in nodes.items() if {"CPU", "GPU"} & info["Resources"].keys()
    }
    if not checked:
        raise ClusterRefused(
            "no node of the cluster has CPUs, and trials need some; add a node with "
            "`ray start --address=ADDRESS`"
        )
    ours, mark = version(_DISTRIBUTION), secrets.token_hex(16)
    with _shared_directory(root) as directory:
        (directory / _DRIVER_FILE).write_text(mark, encoding="utf-8")
        answers = _query(checked, directory, mark, ours, store)
        checked = _without_dead_nodes(checked, answers)
        faults = [
            f"node {node_name(info)}: {fault}"
            for node, info in checked.items()
            if (
                fault := fault_of(answers[node], ours, root)
                or _unseen(directory / node, mark, root)
            )
        ]
    if faults:
        raise ClusterRefused("\n".join(faults))
    found = {node: answer for node, answer in answers.items() if not isinstance(answer, str)}
    return [machine_of(info, found[node]) for node, info in checked.items()]


def fault_of(answer: Mapping[str, Any] | str, ours: str, root: Path) -> str | None:
    """Return the fault that a node's answer shows, with a remedy; None if it shows none."""
    if isinstance(answer, str):
        return f"{answer}; every node must be able to run a trial; repair or remove the node"
    theirs = answer["version"]
    if theirs != ours:
        has = f"{_DISTRIBUTION} {theirs}" if theirs else f"no {_DISTRIBUTION}"
        return (
            f"has {has}; this process has {ours}, and all must have the same; install it there: "
            f"pip install {_DISTRIBUTION}=={ours}"
        )
    if answer["fault"]:
        return f"{root}: {answer['fault']}; {_shared(root)}"
    if answer["store"]:
        return f"{'.'.join(CHECKPOINTS_KEY)}: {answer['store']}"
    return None


def store_fault(prefix: str, version: str) -> str | None:
    """Return why a trial cannot save checkpoints below a prefix, with a remedy; None if it can.

    Runs on a node, in the environment that its trials have.
    """
    from trainable.store.objects import StoreUnusable, probe

    try:
        probe(prefix)
    except StoreUnusable as error:
        return f"{error}; a trial there has the environment that `ray start` had"
    except ImportError as error:  # Gradsweep is installed without its dependencies
        return (
            f"{prefix} cannot be reached ({error}); an object store needs fsspec and pyarrow; "
            f"install them there: pip install {_DISTRIBUTION}=={version}"
        )
    return None


def node_name(info: Mapping[str, Any]) -> str:
    """Return a node's name for messages: its given name or its host's, and its address."""
    address = info["NodeManagerAddress"]
    given = info.get("NodeName")
    name = given if given and given != address else info["NodeManagerHostname"]
    return f"{name} at {address}"


def machine_of(info: Mapping[str, Any], answer: Mapping[str, Any]) -> Machine:
    """Return a node's resources: those that Ray counts, and the GPUs' memory, from the node."""
    offered = info["Resources"]
    found = [Gpu(name, memory) for name, memory in answer["gpus"]]
    count = int(offered.get("GPU", 0))
    # A GPU of unknown memory is never shared.
    unknown = Gpu("unknown", LEAST_GPU_MEMORY)
    return Machine(
        name=node_name(info),
        cpus=int(offered.get("CPU", 0)),
        memory=int(offered.get("memory", 0)),
        gpus=tuple((found + [unknown] * count)[:count]),
    )


def _query(
    nodes: Mapping[str, Mapping[str, Any]],
    directory: Path,
    mark: str,
    ours: str,
    store: str | None,
) -> dict[str, Mapping[str, Any] | str]:
    """Run the check on all nodes at once; for a node that fails, the answer is the reason."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    check = ray.remote(num_cpus=0, max_retries=0)(_make_check())
    pending = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = check.options(scheduling_strategy=strategy)
        pending[task.remote(str(directory), node, mark, ours, store)] = node
    done, late = ray.wait([*pending], num_returns=len(pending), timeout=SECONDS)
    answers: dict[str, Mapping[str, Any] | str] = {}
    for future in late:
        answers[pending[future]] = f"did not answer within {SECONDS:g} s"
        ray.cancel(future, force=True)
    for future in done:
        try:
            answers[pending[future]] = ray.get(future)
        # Of any type: the node or its worker died, or the code package could not be unpacked.
        except Exception as error:
            words = " ".join(str(error).split())[-300:]
            answers[pending[future]] = f"could not be checked ({type(error).__name__}: {words})"
    return answers


def _without_dead_nodes(
    nodes: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Mapping[str, Any] | str]
) -> dict[str, Mapping[str, Any]]:
    """Drop nodes that the head reports as dead by now; keep all if none would remain."""
    import ray

    dead = {node for node, answer in answers.items() if isinstance(answer, str)}
    if dead:
        every: Any = ray.nodes  # Ray has no types for it
        dead &= {info["NodeID"] for info in every() if not info["Alive"]}
    return {node: info for node, info in nodes.items() if node not in dead} or dict(nodes)


def _make_check() -> Callable[[str, str, str, str, str | None], dict[str, Any]]:
    """Return the check that runs on a node.

    Ray pickles a nested function by value, so that it also runs on nodes without Gradsweep.
    """

    def check(
        directory: str, name: str, mark: str, ours: str, store: str | None
    ) -> dict[str, Any]:
        import os
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        found: dict[str, Any] = {"version": None, "fault": None, "store": None, "gpus": []}
        try:
            found["version"] = installed("gradsweep")
        except PackageNotFoundError:
            return found
        if found["version"] != ours:
            return found
        try:
            with open(os.path.join(directory, "driver"), encoding="utf-8") as theirs:
                if theirs.read() != mark:
                    found["fault"] = "has other files there than the driver"
            with open(os.path.join(directory, name), "w", encoding="utf-8") as own:
                own.write(mark)
                own.flush()
                os.fsync(own.fileno())
        except FileNotFoundError:
            found["fault"] = "the driver's files are not there"
        except OSError as error:
            found["fault"] = f"cannot be read and written there ({error.strerror})"
        from sweeps.engine.resources import visible_gpus

        found["gpus"] = [(gpu.name, gpu.memory) for gpu in visible_gpus(None)]
        if store is not None:
            from sweeps.engine.node_checks import store_fault

            found["store"] = store_fault(store, ours)
        return found

    return check


def _unseen(written: Path, mark: str, root: Path) -> str | None:
    """Return why the driver does not see a node's file; waits for slow network file systems."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if written.read_text(encoding="utf-8") == mark:
                return None
        if time.monotonic() > deadline:
            return f"{root}: the driver does not see the node's files; {_shared(root)}"
        time.sleep(0.1)


def _shared(root: Path) -> str:
    return (
        "every node must see the same files there, as the same user; mount a shared file system "
        f"at {root} on each, or choose one with --root"
    )


@contextlib.contextmanager
def _shared_directory(root: Path) -> Iterator[Path]:
    """Create a temporary directory in the root, and remove those of killed drivers.

    If this call creates the root, it also removes the root.
    """
    missing = [each for each in (root, *root.parents) if not each.exists()]
    root.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    # Use the clock of the storage, which may differ from this machine's.
    stale = directory.stat().st_mtime - _STALE_SECONDS
    for other in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it
            if other.stat().st_mtime < stale:
                shutil.rmtree(other)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for each in missing:  # the innermost first; a directory with other files stays
            with contextlib.suppress(OSError):
                each.rmdir()
