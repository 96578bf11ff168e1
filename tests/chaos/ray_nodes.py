"""Ray nodes on this machine, each with its own processes, so that a test can kill one.

    python -m tests.chaos.ray_nodes OPTIONS    starts one node, says in JSON where it is, and keeps
                                               it until its input ends or it is killed

All of a node's processes die with the one that started it, as when a machine is switched off. On
127.0.0.1 all nodes share an address; on hosts of their own (`networks.py`) each has one. What must
not live here: sweeps, and what must be true of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.networks import Host
from tests.integration.commandline import wait_until

_ROOT = Path(__file__).parents[2]
_STORE_BYTES = 80 * 2**20
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Without it Ray takes no loopback address for a node's; see `sweeps/__init__.py`."""


@dataclass(frozen=True)
class Node:
    """A started node.

    Attributes:
        id: Ray's name of it, in hex.
        address: Of the cluster's head.
        raylet: The process that makes it one.
    """

    id: str
    address: str
    raylet: int
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """SIGKILL everything of it at once, its workers included."""
        theirs: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            theirs = psutil.Process(self.raylet).children(recursive=True)
        self.process.kill()
        for one in theirs:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()

    def workers(self) -> dict[int, str]:
        """The live processes that trials run in, with the trial's log that each writes."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.raylet).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    for file in one.open_files():
                        if file.path.endswith("trial.log"):
                            found[one.pid] = file.path
        return found


class RayNodes:
    """Starts nodes, and ends those that are left.

    Args:
        environment: Further variables of every node, and so of every trial.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.environment = environment or {}
        self._started: list[Node] = []
        # Short: the names of sockets below it must have less than 108 characters.
        self._scratch = tempfile.TemporaryDirectory(prefix="rn-", dir="/tmp")

    def start(
        self,
        *,
        cpus: int,
        environment: dict[str, str] | None = None,
        host: Host | None = None,
        within: Sequence[str] = (),
    ) -> Node:
        """Start a node: the head when it is the first one.

        Args:
            cpus: How many Ray counts there.
            environment: Further variables of this node alone.
            host: Where it runs; None: on 127.0.0.1.
            within: What precedes its command, there.
        """
        options = [f"--cpus={cpus}", f"--scratch={self._scratch.name}"]
        options += [f"--join={self._started[0].address}"] if self._started else []
        options += [f"--ip={host.address}"] if host else []
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TUNE_"))}
        process = subprocess.Popen(
            [
                *(host.within if host else ()),
                *within,
                *(sys.executable, "-m", "tests.chaos.ray_nodes", *options),
            ],
            cwd=_ROOT,
            env=variables | self.environment | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        told = json.loads(process.stdout.readline() or "null")
        assert told is not None, f"the node did not start: exit code {process.wait()}"
        node = Node(process=process, **told)
        self._started.append(node)
        return node

    def close(self) -> None:
        """End all nodes, the head last."""
        for node in reversed(self._started):
            node.kill()
            for pipe in (node.process.stdin, node.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            node.process.wait()
        wait_until(lambda: not self._alive(), seconds=30)
        self._scratch.cleanup()

    def _alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if any(self._scratch.name in word for word in process.cmdline()):
                    found.append(process)
                    process.kill()  # agents take a while to notice
        return found


def main() -> None:
    """Be a node."""
    reader = argparse.ArgumentParser()
    for name in ("cpus", "scratch", "join", "ip"):
        reader.add_argument(f"--{name}", default="")
    asked = reader.parse_args()
    if asked.ip:
        os.environ.pop(LOOPBACK, None)
    else:
        os.environ[LOOPBACK] = "0"
    from ray._private.node import Node as RayNode
    from ray._private.parameter import RayParams

    settings: dict[str, Any] = {
        "num_cpus": int(asked.cpus),
        "num_gpus": 0,
        "object_store_memory": _STORE_BYTES,
        "include_dashboard": False,
        "include_log_monitor": False,
        "min_worker_port": 0,
        "max_worker_port": 0,
        "node_manager_port": 0,
    }
    if asked.ip:
        settings["node_ip_address"] = asked.ip
    if asked.join:
        settings["gcs_address"] = asked.join
    else:
        settings["temp_dir"] = asked.scratch
    node = RayNode(
        RayParams(**settings), head=not asked.join, shutdown_at_exit=True, spawn_reaper=True
    )
    processes = node.all_processes
    told = {
        "id": node._node_id,
        "address": node.gcs_address,
        "raylet": processes["raylet"][0].process.pid,
    }
    print(json.dumps(told), flush=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.read()


if __name__ == "__main__":
    main()
