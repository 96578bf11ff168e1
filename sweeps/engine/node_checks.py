"""A look at every node of a cluster before a sweep is created: does it have our version, does it
see the same files, and does it reach the store of the checkpoints?

The look is bounded in time, takes no CPU that Ray counts, and leaves nothing behind. What must not
live here: connecting (`cluster`), how trials share the nodes (`resources`).
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

from sweeps.checkpoint_locations import KEY
from sweeps.engine.cluster_address import ClusterRefused
from sweeps.engine.resources import LEAST_GPU_MEMORY, Gpu, Machine

SECONDS = 75.0
"""How long all nodes together may take to answer: longer than the 65 that Ray's head takes, unless
it is told otherwise, to hear that one has died."""
_SEEN_SECONDS = 10.0
"""How long a network's directory may take to show here what a node wrote."""
_OVER_AFTER = 600.0
"""Seconds after which a look is over, whatever became of who began it."""
_PREFIX = ".nodes-"
_DISTRIBUTION = "gradsweep"
_OURS = "driver"


def check_nodes(
    nodes: Mapping[str, Mapping[str, Any]], root: Path, store: str | None = None
) -> list[Machine]:
    """Look at every node on which a trial may run.

    Args:
        nodes: What Ray says of each, by its id.
        root: Where sweeps lie; made for as long as it takes.
        store: The prefix in an object store that is to have the checkpoints; None: the root has.

    Returns:
        What each node offers.

    Raises:
        ClusterRefused: A node does not answer, has another version, does not see the root, or
            does not reach the store; each such node is named.
    """
    asked = {
        each: told for each, told in nodes.items() if {"CPU", "GPU"} & told["Resources"].keys()
    }
    if not asked:
        raise ClusterRefused(
            "no node of the cluster has CPUs, and trials need some; add a node with "
            "`ray start --address=ADDRESS`"
        )
    ours, mark = version(_DISTRIBUTION), secrets.token_hex(16)
    with _meeting_place(root) as place:
        (place / _OURS).write_text(mark, encoding="utf-8")
        answers = _ask(asked, place, mark, ours, store)
        asked = _without_the_dead(asked, answers)
        wrong = [
            f"node {node_name(told)}: {fault}"
            for each, told in asked.items()
            if (fault := fault_of(answers[each], ours, root) or _unseen(place / each, mark, root))
        ]
    if wrong:
        raise ClusterRefused("\n".join(wrong))
    looks = {each: answer for each, answer in answers.items() if not isinstance(answer, str)}
    return [machine_of(told, looks[each]) for each, told in asked.items()]


def fault_of(answer: Mapping[str, Any] | str, ours: str, root: Path) -> str | None:
    """What is wrong with a node by its own answer, and what to do; None when nothing is.

    Args:
        answer: What the look returned there, or why it did not.
        ours: Our version.
    """
    if isinstance(answer, str):
        return f"{answer}; every node must be able to run a trial; mend it, or take it out"
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
        return f"{'.'.join(KEY)}: {answer['store']}"
    return None


def store_fault(prefix: str, version: str) -> str | None:
    """Why a trial could not keep checkpoints below a prefix, and what to do; None when it could.

    Runs on a node, in an environment as its trials have.

    Args:
        prefix: Such as `s3://bucket/sweeps`.
        version: Ours, which the node has, too.
    """
    from trainable.storage.objects import StoreUnusable, probe

    try:
        probe(prefix)
    except StoreUnusable as error:
        return f"{error}; a trial there has the environment that `ray start` had"
    except ImportError as error:  # installed without what it depends on
        return (
            f"{prefix} cannot be asked for ({error}); an object store is reached by way of "
            f"fsspec and pyarrow; install them there: pip install {_DISTRIBUTION}=={version}"
        )
    return None


def node_name(told: Mapping[str, Any]) -> str:
    """What people call a node: its host's name, or the one that it was given, and its address."""
    address = told["NodeManagerAddress"]
    given = told.get("NodeName")
    name = given if given and given != address else told["NodeManagerHostname"]
    return f"{name} at {address}"


def machine_of(told: Mapping[str, Any], answer: Mapping[str, Any]) -> Machine:
    """What a node offers: what Ray counts there, and the GPUs' memory, which Ray does not know."""
    offered = told["Resources"]
    found = [Gpu(name, memory) for name, memory in answer["gpus"]]
    count = int(offered.get("GPU", 0))
    # Of one whose memory is not known, no trial gets less than all.
    unknown = Gpu("unknown", LEAST_GPU_MEMORY)
    return Machine(
        name=node_name(told),
        cpus=int(offered.get("CPU", 0)),
        memory=int(offered.get("memory", 0)),
        gpus=tuple((found + [unknown] * count)[:count]),
    )


def _ask(
    nodes: Mapping[str, Mapping[str, Any]], place: Path, mark: str, ours: str, store: str | None
) -> dict[str, Mapping[str, Any] | str]:
    """Let every node look, all at once; of one that cannot, the answer is why."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_make_look())
    pending = {}
    for each in nodes:
        there = NodeAffinitySchedulingStrategy(each, soft=False)
        asked = look.options(scheduling_strategy=there)
        pending[asked.remote(str(place), each, mark, ours, store)] = each
    done, late = ray.wait([*pending], num_returns=len(pending), timeout=SECONDS)
    answers: dict[str, Mapping[str, Any] | str] = {}
    for future in late:
        answers[pending[future]] = f"did not answer within {SECONDS:g} s"
        ray.cancel(future, force=True)
    for future in done:
        try:
            answers[pending[future]] = ray.get(future)
        # Of any kind: the node is gone, its worker died, what travels could not be unpacked.
        except Exception as error:
            words = " ".join(str(error).split())[-300:]
            answers[pending[future]] = f"could not look ({type(error).__name__}: {words})"
    return answers


def _without_the_dead(
    nodes: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Mapping[str, Any] | str]
) -> dict[str, Mapping[str, Any]]:
    """Leave out the nodes that had died when they were asked, which the head has heard by now;
    all of them stay if none would be left.
    """
    import ray

    silent = {each for each, answer in answers.items() if isinstance(answer, str)}
    if silent:
        every: Any = ray.nodes  # Ray has no types for it
        silent &= {told["NodeID"] for told in every() if not told["Alive"]}
    return {each: told for each, told in nodes.items() if each not in silent} or dict(nodes)


def _make_look() -> Callable[[str, str, str, str, str | None], dict[str, Any]]:
    """What is done on a node. Being made here it is sent whole: nodes that lack this package can
    say so.
    """

    def look(place: str, name: str, mark: str, ours: str, store: str | None) -> dict[str, Any]:
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
            with open(os.path.join(place, "driver"), encoding="utf-8") as theirs:
                if theirs.read() != mark:
                    found["fault"] = "holds other files there than here"
            with open(os.path.join(place, name), "w", encoding="utf-8") as own:
                own.write(mark)
                own.flush()
                os.fsync(own.fileno())
        except FileNotFoundError:
            found["fault"] = "what was written here is not there"
        except OSError as error:
            found["fault"] = f"cannot be read and written there ({error.strerror})"
        from sweeps.engine.resources import visible_gpus

        found["gpus"] = [(gpu.name, gpu.memory) for gpu in visible_gpus(None)]
        if store is not None:
            from sweeps.engine.node_checks import store_fault

            found["store"] = store_fault(store, ours)
        return found

    return look


def _unseen(written: Path, mark: str, root: Path) -> str | None:
    """Why a node's file is not seen here; a network's directory may take a moment."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if written.read_text(encoding="utf-8") == mark:
                return None
        if time.monotonic() > deadline:
            return f"{root}: what was written there is not here; {_shared(root)}"
        time.sleep(0.1)


def _shared(root: Path) -> str:
    return (
        "every node must see the same files there, as the same user; mount a shared file system "
        f"at {root} on each, or name one with --root"
    )


@contextlib.contextmanager
def _meeting_place(root: Path) -> Iterator[Path]:
    """A directory in the root, which is made for it; nothing remains but what was there, and what
    a driver left that was killed while it looked is removed.
    """
    missing = [each for each in (root, *root.parents) if not each.exists()]
    root.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    # By the storage's own clock, which may not be this machine's.
    over = place.stat().st_mtime - _OVER_AFTER
    for left in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else removes it
            if left.stat().st_mtime < over:
                shutil.rmtree(left)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        for each in missing:  # the innermost first; one that somebody else has used stays
            with contextlib.suppress(OSError):
                each.rmdir()
