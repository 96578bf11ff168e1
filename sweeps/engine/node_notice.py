"""Learn that a machine is about to be taken away: from Ray, or from the user's command.

A node of a cluster that gets notice is drained: Ray starts nothing there any more, and ends the
node once its trials have left. What must not live here: what a notice means for a trial or for the
sweep (`run.driver`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sweeps.engine.ray_compat.ray_internals import drain_node, draining_nodes, is_head

_POLL_SECONDS = 1.0
COMMAND_SECONDS = 10.0
"""How long the user's command may take; one that takes longer is killed, and gives no notice."""
_NOT_RUN = (126, 127)
"""The exit codes with which a shell says that it could not run a command."""


class NoticeHandlers(NamedTuple):
    """What a watch calls, from its thread."""

    leave: Callable[[], None]
    """The driver's machine, or the head of its cluster, is about to be taken away."""
    move: Callable[[str, str], None]
    """Another node is; receives its id and its address."""
    warn: Callable[[str], None]


@contextlib.contextmanager
def watching(
    command: str | None, every: float, handlers: NoticeHandlers, *, in_cluster: bool
) -> Iterator[None]:
    """Watch for notices while the context is open; in a cluster, of all of its nodes."""
    over = threading.Event()

    def watch_machine() -> None:
        if command is None:
            return
        fault = wait_for_notice(command, every, over.wait)
        if fault is not None:
            handlers.warn(fault)
        elif not over.is_set():
            handlers.leave()

    def watch_nodes() -> None:
        nodes = _Nodes(command, every, handlers)
        while not over.wait(_POLL_SECONDS):
            # Of any type, while the head is unavailable: the watch of Ray reports a loss.
            with contextlib.suppress(Exception):
                nodes.look()

    target = watch_nodes if in_cluster else watch_machine
    thread = threading.Thread(target=target, name="notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(None if in_cluster else 0.0)  # before this process leaves the cluster


def wait_for_notice(
    command: str, every: float, pause: Callable[[float], object] = time.sleep
) -> str | None:
    """Run a command until it gives notice (None), cannot be run (the fault), or `pause` is true.

    In a cluster it runs as a task on each node.
    """
    while True:
        code, said = _run(command)
        if code == 0:
            return None
        if code in _NOT_RUN:
            return (
                f"preemption.command cannot be run ({said or f'exit code {code}'}), and gives no "
                "notice; it is a command of sh that ends with exit code 0 when the machine is "
                "about to be taken away; correct it, then resume"
            )
        if pause(every):
            return None


def _run(command: str) -> tuple[int | None, str]:
    """Run a command; return its exit code, None if it took too long, and its last error."""
    with subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return None, ""
    return process.returncode, "".join(errors.splitlines()[-1:])


class _Nodes:
    """The nodes of the cluster, each with the task that runs the command there."""

    def __init__(self, command: str | None, every: float, handlers: NoticeHandlers) -> None:
        import ray

        self._command, self._every, self._handlers = command, every, handlers
        context = ray.get_runtime_context()
        self._address, self._own = context.gcs_address, context.get_node_id()
        self._tasks: dict[str, Any] = {}
        """The running task of each node; None: it has ended."""
        self._noticed, self._told = set[str](), set[str]()
        self._faults: set[str] = set()

    def look(self) -> None:
        """Call the handlers for nodes that have got notice since the last call."""
        import ray

        all_nodes: Any = ray.nodes  # Ray has no types for it
        nodes = {node["NodeID"]: node for node in all_nodes() if node["Alive"]}
        draining = draining_nodes()
        if self._command is not None:
            self._run_command(nodes, self._command)
        for node in nodes.keys() & (self._noticed | draining):
            ends_sweep = node == self._own or is_head(nodes[node])
            if node not in self._told and ends_sweep:
                self._handlers.leave()
            elif node not in self._told:
                self._handlers.move(node, nodes[node]["NodeManagerAddress"])
            self._told.add(node)
            self._end_command(node)
            if not ends_sweep and node not in draining:
                drain_node(node, self._address, "preemption.command gave notice")

    def _end_command(self, node: str) -> None:
        """End the command on a node, which else would not count as idle, and stay."""
        import ray

        task, self._tasks[node] = self._tasks.get(node), None
        if task is not None:
            ray.cancel(task, force=True)

    def _run_command(self, nodes: dict[str, Any], command: str) -> None:
        """Run the command on new nodes, and note on which it has given notice."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        wait = ray.remote(num_cpus=0, max_retries=0)(wait_for_notice)
        for node in nodes.keys() - self._tasks.keys():
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            task = wait.options(scheduling_strategy=here)
            self._tasks[node] = task.remote(command, self._every)
        for node, task in list(self._tasks.items()):
            if task is None or not ray.wait([task], timeout=0)[0]:
                continue
            del self._tasks[node]
            # Of any type: if its process was lost, the command runs again.
            with contextlib.suppress(Exception):
                fault, self._tasks[node] = ray.get(task), None
                if fault is None:
                    self._noticed.add(node)
                elif fault not in self._faults:
                    self._faults.add(fault)
                    self._handlers.warn(f"node {nodes[node]['NodeManagerAddress']}: {fault}")
